"""Warnings about a run that learns nothing."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from kept_metrics import KeptMetrics

from titan_rl.rollout.types import Rollout, RolloutGroup, RolloutStatus, Turn
from titan_rl.run.directory import RunDirectory
from titan_rl.run.observability.progress import Progress
from titan_rl.run.observability.rollout_log import DroppedGroups, RolloutLog
from titan_rl.run.observability.step_metrics import StepReports, group_metrics
from titan_rl.scheduling.batches import GroupBatch
from titan_rl.types import Completion, FinishReason, VersionSpan
from titan_rl.viewer.runs import RunReader
from titan_rl.viewer.warning_signs import IN_A_ROW, WarningSigns

EQUAL = {"rollout/zero_variance_groups": 1.0}
SOME = {"rollout/zero_variance_groups": 0.99}


def group(rewards: list[float], status: RolloutStatus = RolloutStatus.COMPLETED) -> RolloutGroup:
    turn = Turn([1], Completion("g/0/0", [2], [0.0], FinishReason.STOP, [VersionSpan(0, 1)]))
    rollouts = [
        Rollout(f"g/{sibling}", "g", sibling, None, status=status, turns=[turn], reward=reward, advantage=0.0)
        for sibling, reward in enumerate(rewards)
    ]
    return RolloutGroup("g", None, rollouts)


def warnings_for(records: list[dict[str, Any]]) -> list[list[str]]:
    signs = WarningSigns()
    return [signs.look(record) for record in records]


def test_equal_rewards_in_several_steps_in_a_row_warn_once():
    assert IN_A_ROW == 3
    assert [len(texts) for texts in warnings_for([EQUAL] * 9)] == [0, 0, 1, 0, 0, 0, 0, 0, 0]
    assert not any(warnings_for([EQUAL, EQUAL, SOME] * 3))
    assert [len(texts) for texts in warnings_for([EQUAL, SOME, EQUAL, {}, EQUAL, EQUAL])] == [0, 0, 0, 0, 0, 1]


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ([group([0.0, 0.0]), group([1.0, 1.0])], "titan-rl sft"),
        ([group([0.0, 1.0], RolloutStatus.TRUNCATED_LENGTH)], "sampling.max_tokens"),
        ([group([0.0, 1.0], RolloutStatus.TRUNCATED_PROMPT)], "model.max_context"),
        ([group([0.0, 1.0], RolloutStatus.ERROR_PARSE)], "model.renderer"),
        ([group([0.0, 1.0]), group([0.0, 0.0])], None),
    ],
)
def test_warning_signs_are_found_in_group_metrics(groups: list[RolloutGroup], expected: str | None):
    texts = [text for step in warnings_for([group_metrics(groups)] * IN_A_ROW) for text in step]
    assert [expected in text for text in texts] == ([True] if expected else [])


def test_viewer_warning_names_the_step(tmp_path: Path):
    records = [{"step": step, **EQUAL} for step in range(1, 6)]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    (warning,) = RunReader(tmp_path).summary()["warnings"]
    assert warning.startswith("step 3: for 3 steps all rollouts of every group earned the same reward")


def test_warning_is_shown_among_the_steps(tmp_path: Path):
    shown = io.StringIO()
    progress = Progress(5, shown)
    reports = StepReports(KeptMetrics(), progress, RolloutLog(RunDirectory(tmp_path), 0, progress))
    for step in range(1, 6):
        groups = [group([0.5, 0.5])]
        batch = GroupBatch(groups, step - 1, {}, lambda: None)
        reports.trained(step, batch, DroppedGroups(), {"staleness_mean": 0.0})
        reports.add(step, {"time/step_s": 1.0})
        reports.report(step)
    lines = shown.getvalue().splitlines()
    assert [line[:8] for line in lines] == ["step 1/5", "step 2/5", "warning:", "step 3/5", "step 4/5", "step 5/5"]


def fed(progress: Progress, folder: Path, rewards: list[float], *, past: list[dict[str, Any]] | None = None) -> None:
    """Report steps with these mean rewards, of rollouts that earn 0 or 1."""
    reports = StepReports(KeptMetrics(), progress, RolloutLog(RunDirectory(folder), 0, progress))
    reports.recall(past or [])
    for step, reward in enumerate(rewards, len(past or []) + 1):
        ones = round(reward * 50)
        batch = GroupBatch([group([1.0] * ones + [0.0] * (50 - ones))], step - 1, {}, lambda: None)
        reports.trained(step, batch, DroppedGroups(), {"staleness_mean": 0.0})
        reports.add(step, {"time/step_s": 1.0})
        reports.report(step)


RISE = [0.3, 0.36, 0.44, 0.5, 0.58, 0.62, 0.7, 0.78, 0.82, 0.9]
FALL = [0.88, 0.8, 0.74, 0.66, 0.62, 0.58, 0.52, 0.44, 0.4, 0.36, 0.3, 0.2, 0.2, 0.2, 0.2]


def test_fall_of_the_reward_warns_once_while_it_happens(tmp_path: Path):
    shown = io.StringIO()
    fed(Progress(25, shown), tmp_path, [*RISE, *FALL])
    lines = shown.getvalue().splitlines()
    (at,) = [place for place, line in enumerate(lines) if line.startswith("warning: the reward falls: ")]
    assert len(lines[at:]) > 6, "long before the last of 25 steps"
    assert "Reward in training 0.836 at step 12, 0.564 at step 18" in lines[at]
    assert 'checkpoint.keep = "best"' in lines[at]


@pytest.mark.parametrize(
    "rewards",
    [[*RISE, *[0.9, 0.86, 0.92, 0.88, 0.94] * 5], [0.5, 0.4, 0.56, 0.44, 0.6, 0.46] * 10, [0.9, 0.88, 0.92] * 10],
)
def test_rewards_that_rise_or_only_fluctuate_give_no_warning_of_a_fall(tmp_path: Path, rewards: list[float]):
    shown = io.StringIO()
    fed(Progress(60, shown), tmp_path, rewards)
    assert "falls" not in shown.getvalue()


def test_resumed_run_compares_its_rewards_with_those_before(tmp_path: Path):
    before = [
        {"step": step, "rollout/finished_reward_mean": reward, "rollout/reward_std": 0.4}
        for step, reward in enumerate(RISE, 1)
    ]
    shown = io.StringIO()
    fed(Progress(25, shown), tmp_path, FALL, past=before)
    assert shown.getvalue().count("the reward falls: ") == 1
    alone = io.StringIO()
    fed(Progress(25, alone), tmp_path / "alone", FALL[-5:])
    assert "falls" not in alone.getvalue()


def test_fall_of_held_out_reward_warns_at_the_validation(tmp_path: Path):
    shown = io.StringIO()
    progress = Progress(5, shown)
    reports = StepReports(KeptMetrics(), progress, RolloutLog(RunDirectory(tmp_path), 0, progress))
    for step, reward in enumerate([0.5, 0.8, 0.78, 0.4, 0.4]):
        figures = {"reward_mean": reward, "reward_std": 0.45, "reward_error": 0.0566}
        reports.validated(step, {f"validation/{name}": value for name, value in figures.items()})
    (line,) = shown.getvalue().splitlines()
    assert line.startswith(
        "warning: the reward falls: Held-out reward 0.800 at step 1, 0.400 at step 3 (-0.400 ± 0.080)"
    )


def test_solved_run_is_not_warned_of_equal_rewards():
    partly = {"rollout/finished_reward_mean": 0.5, "rollout/reward_min": 0.0, "rollout/reward_max": 1.0}
    solved = {**EQUAL, "rollout/finished_reward_mean": 1.0, "rollout/reward_min": 1.0, "rollout/reward_max": 1.0}
    hopeless = {**EQUAL, "rollout/finished_reward_mean": 0.0, "rollout/reward_min": 0.0, "rollout/reward_max": 0.0}
    assert not any(warnings_for([partly, *[solved] * 5]))
    assert any(warnings_for([partly, *[hopeless] * 5]))
    assert any(warnings_for([solved] * 5)), "nothing shows yet that rewards can differ"


def test_win_rate_against_stronger_opponents_is_no_fall():
    falling = [*RISE, *FALL]
    records = [{"step": step, "rollout/finished_reward_mean": reward} for step, reward in enumerate(falling)]
    assert any(warnings_for(records))
    assert not any(warnings_for([{**record, "league/win_rate": 0.5} for record in records]))

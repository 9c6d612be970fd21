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
from titan_rl.viewer.verdicts import IN_A_ROW, WarningSigns

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

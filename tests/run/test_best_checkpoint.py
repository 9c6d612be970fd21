"""Checkpoint with the best held-out reward, and the end of a run at a held-out reward or without progress."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from test_controller import FakeTrainer, Rig

from titan_rl import Reward, Rollout, Rubric
from titan_rl.config.load import load_config
from titan_rl.core.errors import CheckpointError, ConfigError
from titan_rl.evaluation.policies.policy_source import newest_checkpoint
from titan_rl.run.journal.state import RunState
from titan_rl.run.resumption import find_resumption, is_finished
from titan_rl.training.state.checkpoint import latest, list_checkpoints, step_of

RISES_AND_FALLS = {0: 0.1, 2: 0.5, 4: 0.9, 6: 0.6, 8: 0.7, 10: 0.2}
"""Held-out reward by version."""


class Run(Rig):
    """Run whose rollouts earn a reward by the version that sampled them, validated every second step."""

    def __init__(self, folder: Path, rewards: Mapping[int, float], **options: Any) -> None:
        def earned(rollout: Rollout) -> float:
            return rewards.get(rollout.turns[0].completion.version_spans[0].version, 0.0)

        options = {"steps": max(rewards), "checkpoint_interval": 0, **options}
        super().__init__(folder, rubric=Rubric([Reward(earned, name="by_version")]), **options)

    @property
    def steps_saved(self) -> list[int]:
        return [step_of(path) for path in list_checkpoints(self.run_dir.checkpoints)]

    @property
    def screen(self) -> str:
        self.progress_file.flush()
        return Path(self.progress_file.name).read_text()


def resumed(folder: Path, rewards: Mapping[int, float], **options: Any) -> Run:
    """Continue a run from its newest checkpoint."""
    checkpoint = latest(folder / "run" / "checkpoints")
    assert checkpoint is not None
    start = RunState.read(checkpoint)
    trainer = FakeTrainer()
    trainer.version = start.step
    return Run(folder, rewards, start=start, trainer=trainer, **options)


async def test_newest_and_best_checkpoint_are_kept(tmp_path: Path) -> None:
    run = Run(tmp_path, RISES_AND_FALLS, keep="best")
    await run.run()
    assert run.trainer.saved == [2, 4, 10], "the best so far, and the last"
    assert run.steps_saved == [4, 10]


async def test_best_checkpoint_stays_while_others_come_and_go(tmp_path: Path) -> None:
    run = Run(tmp_path, RISES_AND_FALLS, keep="best", checkpoint_interval=1)
    await run.run()
    assert run.trainer.saved == list(range(1, 11))
    assert run.steps_saved == [4, 10]


async def test_best_checkpoint_survives_a_resume(tmp_path: Path) -> None:
    await Run(tmp_path, RISES_AND_FALLS, keep="best", steps=6).run()
    again = resumed(tmp_path, RISES_AND_FALLS, keep="best")
    await again.run()
    assert again.steps_saved == [4, 10]
    better = resumed(tmp_path, {**RISES_AND_FALLS, 12: 0.95, 14: 0.1}, keep="best", steps=14)
    await better.run()
    assert better.steps_saved == [12, 14]


async def test_run_stops_at_a_held_out_reward(tmp_path: Path) -> None:
    run = Run(tmp_path, RISES_AND_FALLS, training={"stop_at": {"reward": 0.9}})
    summary = await run.run()
    assert (summary.steps, summary.reward_after) == (4, 0.9)
    assert run.steps_saved == [4]
    assert run.trainer.exported == [run.run_dir.export]
    assert run.steps_with("validation/reward_mean") == [0, 2, 4], "the last one is not repeated"
    assert "stopping at step 4: the held-out reward 0.900 has reached training.stop_at.reward = 0.9" in run.screen


async def test_first_validation_does_not_stop_a_run(tmp_path: Path) -> None:
    run = Run(tmp_path, {0: 0.9, 2: 0.2, 4: 0.9, 6: 0.1}, training={"stop_at": {"reward": 0.9}})
    assert (await run.run()).steps == 4


async def test_run_stops_after_validations_without_progress(tmp_path: Path) -> None:
    run = Run(tmp_path, RISES_AND_FALLS, training={"stop_at": {"patience": 2}}, keep="best")
    assert (await run.run()).steps == 8
    assert run.steps_saved == [4, 8]
    assert "stopping at step 8: no held-out reward above 0.900, of step 4, in 2 validations" in run.screen


async def test_validations_before_a_resume_count_for_patience(tmp_path: Path) -> None:
    await Run(tmp_path, RISES_AND_FALLS, steps=6).run()
    again = resumed(tmp_path, RISES_AND_FALLS, training={"stop_at": {"patience": 2}})
    assert (await again.run()).steps == 8
    later = resumed(tmp_path, RISES_AND_FALLS, training={"stop_at": {"patience": 2}})
    assert (await later.run()).steps == 8, "resumed without a change, it has nothing to do"


async def test_run_that_stopped_early_is_finished_until_its_limit_changes(tmp_path: Path) -> None:
    options = {"training": {"stop_at": {"patience": 2}}}
    run = Run(tmp_path, RISES_AND_FALLS, **options)
    await run.run()
    run.run_dir.export.mkdir()
    config = run.config
    assert is_finished(config, run.run_dir)
    with pytest.raises(
        CheckpointError, match=r"stopped at step 8: no held-out reward .*--training.stop_at.patience none"
    ):
        find_resumption(config, run.run_dir)
    patient = config.training.model_copy(update={"stop_at": config.training.stop_at.model_copy(update={"patience": 9})})
    assert not is_finished(config.model_copy(update={"training": patient}), run.run_dir)


async def test_summary_names_the_best_checkpoint_and_its_export(tmp_path: Path) -> None:
    summary = await Run(tmp_path, RISES_AND_FALLS, keep="best").run()
    assert summary.rows["best"].startswith("step 4, with validation reward 0.900; export it: titan-rl export ")
    assert summary.rows["best"].endswith("/run OUT --best")
    rising = await Run(tmp_path / "rising", {0: 0.1, 2: 0.5, 4: 0.9}, keep="best").run()
    assert "best" not in rising.rows, "the last one is the best"


async def test_initial_model_is_named_as_the_best_and_is_not_exported(tmp_path: Path) -> None:
    run = Run(tmp_path, {0: 0.6, 2: 0.6, 4: 0.2}, keep="best")
    summary = await run.run()
    assert summary.rows["best"] == "the initial model, with validation reward 0.600; no step is better"
    with pytest.raises(ConfigError, match=r"no step of .*/run is better than its initial model.*use model\.path"):
        newest_checkpoint(run.run_dir.path, best=True)


async def test_best_policy_of_a_run_is_found_for_its_export(tmp_path: Path) -> None:
    run = Run(tmp_path, RISES_AND_FALLS, keep="best")
    await run.run()
    best = newest_checkpoint(run.run_dir.path, best=True)
    assert best is not None
    assert best.version == 4
    without = Run(tmp_path / "without", {2: 0.1}, held_out=0)
    await without.run()
    with pytest.raises(ConfigError, match=r"no checkpoint of .* was validated.*validation\.interval"):
        newest_checkpoint(without.run_dir.path, best=True)


TOML = """
[task]
type = "test_controller:Counting"
[model]
path = "unused"
"""


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ([("checkpoint.keep", "best")], 'checkpoint.keep = "best" .*set validation.interval'),
        ([("training.stop_at.patience", "3")], "training.stop_at.patience = 3 .*set validation.interval"),
        ([("training.stop_at.reward", "0.5")], "training.stop_at.reward = 0.5 .*set validation.interval"),
        ([("training.stop_at.patience", "0"), ("validation.interval", "2")], "training.stop_at.patience"),
        ([("checkpoint.keep", "newest"), ("validation.interval", "2")], 'a number above 0 or "best"'),
        ([("checkpoint.keep", "best"), ("validation.interval", "2"), ("validation.num_prompts", "0")], "validation"),
    ],
)
def test_best_and_stop_at_need_validations_between_steps(
    tmp_path: Path, settings: Sequence[tuple[str, str]], expected: str
) -> None:
    (tmp_path / "run.toml").write_text(TOML)
    with pytest.raises(ConfigError, match=r"model\.path = 'unused' is not a folder"):  # the settings fit together
        load_config(tmp_path / "run.toml", [("checkpoint.keep", "best"), ("validation.interval", "2")])
    with pytest.raises(ConfigError, match=expected):
        load_config(tmp_path / "run.toml", settings)

"""League of a run: its versions are frozen, and a killed run resumes with the same versions and opponents."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import test_killed_run
from test_controller import Counting
from test_killed_run import Rig, at_each_record
from test_readme_examples import CountDown

from titan_rl import Rubric, SeatedMessageEnv, SeatedTask
from titan_rl.config.tasks import TaskSource
from titan_rl.rollout.types import Matched, sample_alone
from titan_rl.run.journal.state import RunState
from titan_rl.training.state.checkpoint import latest

STEPS = 7


class Contest(SeatedTask):
    """Settings of a game with a league; the rig plays something else."""

    seat_names = ("own", "other")

    def train_sample(self, seed: int, index: int) -> int:
        return 2 + (seed + index) % 3

    def validation_samples(self, count: int) -> Sequence[int]:
        return [4] * count

    def game(self, sample: Any) -> SeatedMessageEnv:
        raise NotImplementedError

    def rubric(self) -> Rubric:
        return Counting().rubric()


def rig(folder: Path, seed: int, played: dict[str, list[int | None]], monkeypatch: pytest.MonkeyPatch) -> Rig:
    """Return a run that records the opponents of its games in `played`."""

    def make_env(sample: Any) -> CountDown:
        played.setdefault("opponents", []).append(sample.opponent if isinstance(sample, Matched) else None)
        return CountDown(sample_alone(sample))

    monkeypatch.setattr(test_killed_run, "CountDown", make_env)
    seats = {"other": {"league": "hard", "every": 2, "keep": 3, "self_play": 0.2}}
    source = TaskSource(task=Contest.model_validate({"seats": seats}))  # pyright: ignore[reportArgumentType]
    made = Rig(folder, seed, tasks=[source], max_staleness=0, interval=3)
    export = made.trainer.export

    async def write(path: Path) -> None:
        await export(path)
        path.mkdir()  # noqa: ASYNC240

    made.trainer.export = write
    return made


def state_of(folder: Path) -> dict[str, Any]:
    checkpoint = latest(folder / "checkpoints")
    assert checkpoint is not None
    return dict(RunState.read(checkpoint).tasks["curricula"]["contest"])


async def test_league_versions_are_frozen_at_intervals_and_played(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played: dict[str, list[int | None]] = {}
    run = rig(tmp_path / "run", 0, played, monkeypatch)
    await run.run()
    state = state_of(tmp_path / "run")
    assert list(state["versions"]) == ["0", "4", "6"]
    kept = {path.name for path in (tmp_path / "run" / "league").iterdir()}
    assert kept == {"step-000002", "step-000004", "step-000006"}, "the checkpoint of step 3 still has version 2"
    assert {None, 0} <= set(played["opponents"])
    assert set(played["opponents"]) & {2, 4, 6}
    assert state["versions"]["0"][0] > 0


async def test_killed_run_restores_league_versions_and_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = rig(tmp_path / "run", 0, {}, monkeypatch)
    mix = first.controller._mix  # pyright: ignore[reportPrivateUsage]
    standing: dict[int, dict[str, Any]] = {}

    def copy_disk(number: int) -> None:
        if number in (12, 40, 75, 100):
            first.journal.drain()
            shutil.copytree(tmp_path / "run", tmp_path / f"killed-{number}")
            standing[number] = mix.curriculum_state("contest")

    at_each_record(first.journal, copy_disk)
    await first.run()
    assert len(standing) == 4
    undisturbed = state_of(tmp_path / "run")
    for number, state in standing.items():
        folder = tmp_path / f"killed-{number}"
        again = rig(folder, number, {}, monkeypatch)
        restored = again.controller._mix.curriculum_state("contest")  # pyright: ignore[reportPrivateUsage]
        assert restored["groups"] == state["groups"]
        for version, counts in state["versions"].items():
            assert restored["versions"].get(version, [0.0, 0.0]) == counts
        await again.run()
        assert len(again.trainer.weights) == STEPS
        assert again.trainer.weights == first.trainer.weights
        assert list(state_of(folder)["versions"]) == list(undisturbed["versions"])

"""Checkpoints and exports that ranks write, also while ranks that were cut off still write theirs."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("monarch", reason="needs the cpu or gpu extra")

from titan_rl.cluster.processes.remote_process import RemoteProcess
from titan_rl.cluster.trainer_processes import ActorTrainer
from titan_rl.core.errors import ActorDiedError
from titan_rl.rollout.renderer.registry import TemplateFit
from titan_rl.training.data.sample import TrainingSample
from titan_rl.training.settings import ModelConfig, TrainingConfig
from titan_rl.training.state.checkpoint import atomic_directory, being_written
from titan_rl.training.trainer_protocol import StepResult

MODEL = ModelConfig(path="policy", max_context=16)


class Endpoint:
    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    async def call_one(self, *args: Any) -> Any:
        *own, policy = args
        assert policy == ""
        answer = self._function(*own)
        return await answer if isinstance(answer, Awaitable) else answer


class Rank:
    """Writes its name into each folder, at `finish_save` or when a test calls `write`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.directory = Path()
        self.begin_save = Endpoint(self._begin)
        self.finish_save = Endpoint(self.write)
        self.export = Endpoint(self._export)

    def _begin(self, directory: Path, run_state: dict[str, Any]) -> int:
        self.directory = directory
        return run_state["step"]

    def _export(self, path: Path, fit: TemplateFit) -> None:
        self.directory = path
        self.write()

    def write(self) -> None:
        with atomic_directory(self.directory) as folder:
            (folder / "weights").write_text(self._name)


def trainer_of(rank: Rank) -> ActorTrainer:
    return ActorTrainer(RemoteProcess("trainer"), [rank], TrainingConfig(), MODEL)


@pytest.mark.parametrize("old_writes", ["before the other", "while the other does", "after the other"])
async def test_late_writes_of_a_cut_off_trainer_never_replace_a_checkpoint(tmp_path: Path, old_writes: str):
    old, other = Rank("old"), Rank("other")
    cut_off, replacement = trainer_of(old), trainer_of(other)
    await cut_off.begin_save(tmp_path, {"step": 4})
    cut_off.end("no heartbeat of its host for 3 s")
    if old_writes == "before the other":
        old.write()
        assert not (tmp_path / "step-000004").exists()
    assert await replacement.begin_save(tmp_path, {"step": 4}) == 4
    if old_writes == "while the other does":
        old.write()
    await replacement.finish_save()
    if old_writes == "after the other":
        old.write()
    with pytest.raises(ActorDiedError):
        await cut_off.finish_save()
    assert (tmp_path / "step-000004" / "weights").read_text() == "other"

    await replacement.begin_save(tmp_path, {"step": 5})
    await replacement.finish_save()
    assert sorted(os.listdir(tmp_path)) == ["step-000004", "step-000005"], "no other folder is left"


async def test_context_parallel_ranks_receive_the_same_rows() -> None:
    sent: list[Any] = []

    class Recording(Rank):
        def __init__(self) -> None:
            super().__init__("recording")
            self.train = Endpoint(self._train)

        def _train(self, plan: Any) -> StepResult:
            sent.append(plan)
            return StepResult(1, {})

    settings = TrainingConfig(data_parallel=2, context_parallel=2)
    trainer = ActorTrainer(RemoteProcess("trainer"), [Recording() for _ in range(settings.num_ranks)], settings, MODEL)
    samples = [
        TrainingSample("g", name, [1, 2], [False, True], [0.0, -1.0], [0.0, 1.0], [-1, 0], temperature=1.0)
        for name in ("g/0", "g/1")
    ]
    await trainer.step(samples)
    assert sent[0] == sent[1] != sent[2] == sent[3]


async def test_unfinished_checkpoint_is_listed_as_being_written(tmp_path: Path):
    rank = Rank("only")
    trainer = trainer_of(rank)
    await trainer.begin_save(tmp_path, {"step": 1})
    with atomic_directory(rank.directory):
        (folder,) = being_written(tmp_path, "step-000001")
        assert folder.name.endswith(".tmp")
    assert [path.name for path in being_written(tmp_path)] == [rank.directory.name]
    await trainer.finish_save()
    assert os.listdir(tmp_path) == ["step-000001"]


async def test_export_replaces_the_previous_one_and_keeps_other_files(tmp_path: Path):
    (tmp_path / ".step-000001.other").mkdir()
    for name in ("first", "second"):
        await trainer_of(Rank(name)).export(tmp_path / "export")
    assert (tmp_path / "export" / "weights").read_text() == "second"
    assert sorted(os.listdir(tmp_path)) == [".step-000001.other", "export"]


@pytest.mark.parametrize("host_is_lost", [True, False])
async def test_trainer_death_is_excused_only_if_its_host_is_lost(host_is_lost: bool):
    trainer = trainer_of(Rank("only"))
    trainer.remote.end("no heartbeat", excused=host_is_lost)
    assert await trainer.ended() == "trainer died: no heartbeat"
    assert trainer.excused is host_is_lost

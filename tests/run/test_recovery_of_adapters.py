"""Recovery of a trainer process shared by several adapters, on fakes: results equal those of an undisturbed run."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest
from background import HANG_S
from depth import DEEP
from test_trainer_recovery import STEPS, DyingTrainer, Fate, MortalRig, trained_on, undisturbed

from titan_rl.core.errors import ActorDiedError, TrainingError
from titan_rl.run.directory import read_jsonl
from titan_rl.run.shared_trainer import SharedTrainers
from titan_rl.scheduling.fair_turns import FairTurns


class SharedProcess:
    """Process that trains all adapters. When it ends, the trainer of each adapter ends."""

    name = "trainer"
    excused = False

    def __init__(self, fates: Mapping[str, Fate]) -> None:
        self.reason: str | None = None
        self.adapters = {name: AdapterTrainer(fate, self) for name, fate in fates.items()}

    def end(self, reason: str) -> None:
        if self.reason is None:
            self.reason = reason.removeprefix("trainer died: ")
            for trainer in self.adapters.values():
                DyingTrainer.end(trainer, reason)


class AdapterTrainer(DyingTrainer):
    def __init__(self, fate: Fate, remote: SharedProcess) -> None:
        super().__init__(fate)
        self.remote = remote
        fate.trainers.append(self)

    def end(self, reason: str) -> None:
        self.remote.end(reason)


class SharedProcesses:
    """`TrainerProcesses` of several adapters, each with a fate."""

    waits_for = ""

    def __init__(self, fates: Mapping[str, Fate]) -> None:
        self._fates = fates
        self._remote = SharedProcess(fates)

    @property
    def adapters(self) -> Mapping[str, AdapterTrainer]:
        return self._remote.adapters

    @property
    def trainer(self) -> AdapterTrainer:
        return next(iter(self.adapters.values()))

    async def restart(self) -> None:
        await asyncio.sleep(0)
        self._remote = SharedProcess(self._fates)


async def train(folder: Path, fates: Mapping[str, Fate], **settings: Any) -> dict[str, MortalRig]:
    """Train the adapters at the same time. Only the adapter "deadly" may fail."""
    turns = FairTurns(fates)
    shared = SharedTrainers(cast(Any, SharedProcesses(fates)), turns, settings.get("max_respawns", 100))
    rigs = {name: MortalRig(folder / name, fate, group=shared.of(name), **settings) for name, fate in fates.items()}
    errors = await asyncio.gather(*(rig.run() for rig in rigs.values()), return_exceptions=True)
    for name, error in zip(rigs, errors, strict=True):
        if isinstance(error, BaseException) and name != "deadly":
            raise error
    return rigs


async def test_shared_trainer_death_neither_loses_nor_repeats_groups(tmp_path: Path) -> None:
    whole = await undisturbed(tmp_path)
    last = len(whole.fate.moments) - 1
    for moment in range(last + 1) if DEEP else (0, 7, 20, 33, last):
        fates = {"first": Fate([moment]), "second": Fate()}
        rigs = await train(tmp_path / str(moment), fates)
        for name, rig in rigs.items():
            assert rig.weights == whole.weights
            assert trained_on(fates[name]) == trained_on(whole.fate)
            assert rig.replica.pulled == list(range(STEPS + 1)), "loaded versions never decrease"
            assert sorted(rig.replica.asked) == sorted(whole.replica.asked), "nothing is generated again"
            assert len(fates[name].trainers) == 2, "one restart serves all adapters"


async def test_adapter_that_kills_the_trainer_fails_alone_and_is_named(tmp_path: Path) -> None:
    whole = await undisturbed(tmp_path)
    fates = {"deadly": Fate(steps=[2]), "other": Fate()}
    rigs = await train(tmp_path, fates, max_respawns=2)
    assert rigs["other"].weights == whole.weights
    deaths = [text for text in fates["other"].messages if "starting another trainer" in text]
    assert deaths[0] == "trainer died: out of memory, at work for deadly; starting another trainer"
    assert not any("hosts.max_respawns" in text or "it was at step" in text for text in deaths), (
        "deaths do not count for it"
    )
    messages = fates["deadly"].messages
    assert messages[0].endswith("it was at step 2; starting another trainer (1 of hosts.max_respawns = 2)")
    assert sum("is running again" in text for text in messages) == 2


class Once(set[int]):
    """Steps that kill the trainer the first time only."""

    def __contains__(self, step: object) -> bool:
        found = super().__contains__(step)
        self -= {step}
        return found


class IdleDeaths:
    """Two adapters whose idle trainer dies a number of times while the generators work."""

    def __init__(self, folder: Path, deaths: int, *, max_respawns: int) -> None:
        self.fates = {"deadly": Fate(), "other": Fate()}
        self.processes = SharedProcesses(self.fates)
        self._deaths = deaths
        shared = SharedTrainers(cast(Any, self.processes), FairTurns(self.fates), max_respawns)
        self.rigs = {
            name: MortalRig(folder / name, fate, group=shared.of(name), max_respawns=max_respawns)
            for name, fate in self.fates.items()
        }
        for rig in self.rigs.values():
            rig.replica.hold = asyncio.Event()
        self._pull = self.rigs["other"].replica.pull
        self.rigs["other"].replica.pull = self._pull_and_die

    async def run(self) -> dict[str, BaseException | None]:
        """Run both adapters. Returns the error of each, if it failed."""
        errors = await asyncio.gather(*(rig.run() for rig in self.rigs.values()), return_exceptions=True)
        return dict(zip(self.rigs, errors, strict=True))

    async def _pull_and_die(self, version: int) -> None:
        await self._pull(version)
        while self._deaths:
            self._deaths -= 1
            back = [fate.is_back for fate in self.fates.values()]
            for event in back:
                event.clear()
            self.processes.trainer.end("trainer died: killed while generators are at work")
            await asyncio.wait([asyncio.ensure_future(event.wait()) for event in back], timeout=HANG_S)
        for rig in self.rigs.values():
            assert rig.replica.hold is not None
            rig.replica.hold.set()


async def test_trainer_death_between_calls_counts_for_no_adapter(tmp_path: Path) -> None:
    run = IdleDeaths(tmp_path, 1, max_respawns=1)
    run.fates["deadly"].deadly_steps = Once({2})
    assert await run.run() == {"deadly": None, "other": None}
    for name, fate in run.fates.items():
        assert fate.messages[0] == (
            "trainer died: killed while generators are at work, at work for no adapter "
            "(1 of hosts.max_respawns = 1); starting another trainer"
        )
        assert len(run.rigs[name].weights) == STEPS
        restarts = [record.get("train/respawns", 0) for record in read_jsonl(tmp_path / name / "metrics.jsonl")]
        assert max(restarts) == 2, "metrics include restarts that count for no adapter or for the other one"
    (own,) = [text for text in run.fates["deadly"].messages if "out of memory" in text]
    assert own.endswith("it was at step 2; starting another trainer (1 of hosts.max_respawns = 1)")
    (others,) = [text for text in run.fates["other"].messages if "out of memory" in text]
    assert others == "trainer died: out of memory, at work for deadly; starting another trainer"


async def test_too_many_deaths_between_calls_end_the_run(tmp_path: Path) -> None:
    run = IdleDeaths(tmp_path, 2, max_respawns=1)
    for error in (await run.run()).values():
        assert isinstance(error, ExceptionGroup)
        assert error.subgroup(TrainingError) is not None
        (reason,) = error.exceptions
        assert "at work for no adapter, and is not replaced: hosts.max_respawns = 1, and 1 was replaced" in str(reason)


async def test_death_in_finish_save_counts_for_the_saved_adapter() -> None:
    fates = {"saved": Fate(), "other": Fate()}
    processes = SharedProcesses(fates)
    shared = SharedTrainers(cast(Any, processes), FairTurns(fates), 3)
    trainers = {name: shared.of(name).trainer for name in fates}
    processes.adapters["saved"].at_moment = lambda moment: processes.trainer.end("trainer died: the disk is gone")
    with pytest.raises(ActorDiedError):
        await trainers["saved"].finish_save()
    assert await trainers["saved"].ended() == "trainer died: the disk is gone"
    assert not trainers["saved"].excused
    assert await trainers["other"].ended() == "trainer died: the disk is gone, at work for saved"
    assert trainers["other"].excused


async def test_failed_trainer_restart_counts_for_no_adapter(tmp_path: Path) -> None:
    run = IdleDeaths(tmp_path, 1, max_respawns=3)
    restart, failures = run.processes.restart, ["no memory", "no memory"]

    async def restart_later() -> None:
        if failures:
            raise ActorDiedError(f"trainer died: {failures.pop()}")
        await restart()

    run.processes.restart = restart_later
    assert await run.run() == {"deadly": None, "other": None}
    messages = [text for fate in run.fates.values() for text in fate.messages if "no memory" in text]
    assert messages == [
        f"trainer died: no memory, at work for no adapter ({count} of hosts.max_respawns = 3); starting another trainer"
        for count in (2, 3)
    ]

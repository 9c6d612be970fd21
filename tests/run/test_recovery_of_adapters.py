"""Trainer processes of several adapters that die, on fakes: every adapter ends as if they had not."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from depth import DEEP
from test_trainer_recovery import STEPS, DyingTrainer, Fate, MortalRig, trained_on, undisturbed

from titan_rl.core.errors import ActorDiedError
from titan_rl.run.trainer_turns import SharedTrainers
from titan_rl.scheduling.fair_turns import FairTurns


class SharedProcess:
    """The process in which all adapters are trained. Its end is that of each adapter's trainer."""

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
    """Train the adapters at the same time. A rig whose run fails has the error."""
    turns = FairTurns(fates)
    shared = SharedTrainers(cast(Any, SharedProcesses(fates)), turns)
    rigs = {name: MortalRig(folder / name, fate, group=shared.of(name), **settings) for name, fate in fates.items()}
    errors = await asyncio.gather(*(rig.run() for rig in rigs.values()), return_exceptions=True)
    for name, error in zip(rigs, errors, strict=True):
        if isinstance(error, BaseException) and name != "deadly":
            raise error
    return rigs


async def test_a_death_of_the_shared_trainer_loses_and_repeats_no_group_of_any_adapter(tmp_path: Path) -> None:
    whole = await undisturbed(tmp_path)
    last = len(whole.fate.moments) - 1
    for moment in range(last + 1) if DEEP else (0, 7, 20, 33, last):
        fates = {"first": Fate([moment]), "second": Fate()}
        rigs = await train(tmp_path / str(moment), fates)
        for name, rig in rigs.items():
            assert rig.weights == whole.weights
            assert trained_on(fates[name]) == trained_on(whole.fate)
            assert rig.replica.pulled == list(range(STEPS + 1)), "a loaded version never goes back"
            assert sorted(rig.replica.asked) == sorted(whole.replica.asked), "nothing is generated again"
            assert len(fates[name].trainers) == 2, "it is restarted once, for all"


async def test_an_adapter_whose_step_kills_the_trainer_fails_alone_and_is_named_to_the_others(tmp_path: Path) -> None:
    whole = await undisturbed(tmp_path)
    fates = {"deadly": Fate(steps=[2]), "other": Fate()}
    rigs = await train(tmp_path, fates, max_respawns=2)
    assert rigs["other"].weights == whole.weights
    deaths = [text for text in fates["other"].told if "starting another trainer" in text]
    assert deaths[0] == "trainer died: out of memory, at work for deadly; starting another trainer"
    assert not any("hosts.max_respawns" in text or "it was at step" in text for text in deaths), "it counts none"
    told = fates["deadly"].told
    assert told[0].endswith("it was at step 2; starting another trainer (1 of hosts.max_respawns = 2)")
    assert sum("is there again" in text for text in told) == 2


async def test_a_death_between_calls_counts_for_every_adapter(tmp_path: Path) -> None:
    fates = {"first": Fate(), "second": Fate()}
    processes = SharedProcesses(fates)
    shared = SharedTrainers(cast(Any, processes), FairTurns(fates))
    rigs = [MortalRig(tmp_path / name, fate, group=shared.of(name), max_respawns=0) for name, fate in fates.items()]
    pulls = [rig.replica.pull for rig in rigs]

    async def pull_and_die(version: int) -> None:
        await pulls[0](version)
        processes.trainer.end("trainer died: killed while generators are at work")

    rigs[0].replica.pull = pull_and_die
    for rig in rigs:
        rig.replica.hold = asyncio.Event()
    for error in await asyncio.gather(*(rig.run() for rig in rigs), return_exceptions=True):
        assert isinstance(error, ExceptionGroup)
        assert error.subgroup(ActorDiedError) is not None

"""Trainer of one of several experiments, which take turns at the same trainer processes."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan_rl.cluster.processes.roles import Respawns, Role
from titan_rl.core.errors import ActorDiedError, TrainingError
from titan_rl.scheduling.fair_turns import FairTurns
from titan_rl.training.data.sample import TrainingSample
from titan_rl.training.trainer_protocol import StepResult
from titan_rl.weights.types import Manifest

if TYPE_CHECKING:
    from titan_rl.cluster.processes.remote_process import RemoteProcess
    from titan_rl.cluster.trainer_processes import ActorTrainer, TrainerProcesses


class UnownedDeaths:
    """Counter of deaths of the trainer's processes that no experiment has caused. A run has one such counter.

    Args:
        max_respawns: `hosts.max_respawns`.
    """

    def __init__(self, max_respawns: int) -> None:
        self._respawns = Respawns(max_respawns)

    def note(self, why: str) -> str:
        """Count a death, and return the message about it.

        Raises:
            TrainingError: The processes have died too often.
        """
        replaced, count = self._respawns.take(Role.TRAINER)
        text = f"{why}, at work for no adapter{count}"
        if not replaced:
            raise TrainingError(text)
        return text


class SharedWork:
    """Work of the trainer's processes, from one start of the processes to their end.

    A death is attributed to the experiment for which the processes compute or, if they compute for none, to the only
    experiment that has a call in progress, such as the end of a save. If there is no such experiment, the death counts
    for the run itself.

    Args:
        remote: Trainer's processes.
        unowned: Counter of the deaths that no experiment has caused.
    """

    def __init__(self, remote: RemoteProcess, unowned: UnownedDeaths) -> None:
        self.remote = remote
        self._unowned = unowned
        self._computes_for: str | None = None  # current experiment, or that at the time of death
        self._calls: Counter[str] = Counter()  # calls outside of turns, by experiment; those at the time of death stay
        self._unowned_death: str | None = None  # message about a death that no experiment has caused

    @contextmanager
    def of(self, name: str, *, in_turn: bool) -> Generator[None]:
        """Note that the processes work for an experiment during the block.

        Args:
            in_turn: Whether the processes compute for the experiment, which only one block at a time may do. Otherwise
                threads of the processes finish work that was begun.

        Raises:
            ActorDiedError: The processes have died in the block, or before it, which is excused.
        """
        if self.remote.reason is not None:
            raise ActorDiedError(self.death(f"{self.remote.name} died: {self.remote.reason}", name), excused=True)
        if in_turn:
            self._computes_for = name
        else:
            self._calls[name] += 1
        try:
            yield
        except ActorDiedError as error:
            self.remote.end(str(error))
            raise
        finally:
            if self.remote.reason is None:
                if in_turn:
                    self._computes_for = None
                else:
                    self._calls[name] -= 1

    @property
    def cause(self) -> str | None:
        """Experiment to which a death is attributed; None if there is none."""
        if self._computes_for is not None:
            return self._computes_for
        calling = [name for name, count in self._calls.items() if count]
        return calling[0] if len(calling) == 1 else None

    def death(self, why: str, name: str) -> str:
        """Reason for the death of the processes, as it is reported to an experiment.

        Raises:
            TrainingError: No experiment has caused the death, and there were too many such deaths.
        """
        if self.remote.excused or self.cause == name:
            return why
        if self.cause is not None:
            return f"{why}, at work for {self.cause}"
        if self._unowned_death is None:
            self._unowned_death = self._unowned.note(why)
        return self._unowned_death


class TurnTrainer:
    """`Trainer` of one experiment, which computes only in the experiment's turns. Copies are written outside of turns.

    Args:
        trainer: Trainer of the experiment's adapter.
        name: Name of the experiment.
    """

    def __init__(self, trainer: ActorTrainer, turns: FairTurns, work: SharedWork, name: str) -> None:
        self._trainer = trainer
        self._turns = turns
        self._work = work
        self._name = name

    @asynccontextmanager
    async def _turn(self, *, urgent: bool = False) -> AsyncGenerator[None]:
        async with self._turns.turn(self._name, urgent=urgent):
            with self._work.of(self._name, in_turn=True):
                yield

    async def step(self, samples: Sequence[TrainingSample]) -> StepResult:
        async with self._turn():
            return await self._trainer.step(samples)

    async def measure(self, samples: Sequence[TrainingSample]) -> float:
        async with self._turn():
            return await self._trainer.measure(samples)

    async def begin_publish(self) -> None:
        async with self._turn(urgent=True):
            await self._trainer.begin_publish()

    async def finish_publish(self) -> Manifest:
        with self._work.of(self._name, in_turn=False):
            return await self._trainer.finish_publish()

    async def hold_published(self, version: int | None) -> bool:
        with self._work.of(self._name, in_turn=False):
            return await self._trainer.hold_published(version)

    async def begin_save(self, root: Path, run_state: dict[str, Any]) -> int:
        async with self._turn(urgent=True):
            return await self._trainer.begin_save(root, run_state)

    async def finish_save(self) -> None:
        with self._work.of(self._name, in_turn=False):
            await self._trainer.finish_save()

    async def load(self, checkpoint: Path) -> int:
        async with self._turn(urgent=True):
            return await self._trainer.load(checkpoint)

    async def export(self, path: Path) -> None:
        async with self._turn():
            await self._trainer.export(path)

    @property
    def excused(self) -> bool:
        """Whether the processes died because of their host, or because of work that is not this experiment's."""
        return self._trainer.excused or self._work.cause != self._name

    async def ended(self) -> str:
        """Wait until the processes have died, and return the reason; see `ActorTrainer.ended`.

        Raises:
            TrainingError: Too many deaths that no experiment has caused; see `SharedWork.death`.
        """
        return self._work.death(await self._trainer.ended(), self._name)

    def end(self, reason: str) -> None:
        """End the processes; see `ActorTrainer.end`."""
        self._trainer.end(reason)


class SharedTrainers:
    """Trainer processes of several experiments. The first experiment that notices their death restarts them.

    Args:
        processes: Trainer processes, which have started.
        max_respawns: Limit of the deaths of each experiment, and of deaths that no experiment has caused:
            `hosts.max_respawns`.
    """

    def __init__(self, processes: TrainerProcesses, turns: FairTurns, max_respawns: int) -> None:
        self.processes = processes
        self.turns = turns
        self._unowned = UnownedDeaths(max_respawns)
        self.work = SharedWork(processes.trainer.remote, self._unowned)
        self._restarting = asyncio.Lock()

    def of(self, name: str) -> TrainerShare:
        """Return the share of one experiment in the trainer processes."""
        return TrainerShare(self, name)

    async def restart(self, dead: SharedWork) -> None:
        """Restart the processes, unless the dead ones have already been replaced.

        Raises:
            ActorDiedError: The processes do not start, which no experiment has caused.
            TrainingError: The processes have failed to start too often.
        """
        async with self._restarting:
            if self.work is not dead:
                return
            try:
                await self.processes.restart()
            except ActorDiedError as error:
                if error.excused:
                    raise
                raise ActorDiedError(self._unowned.note(str(error)), excused=True) from error
            self.work = SharedWork(self.processes.trainer.remote, self._unowned)


class TrainerShare:
    """Share of one experiment in trainer processes, for its `RecoveringTrainer`.

    Attributes:
        trainer: Newest trainer.
    """

    def __init__(self, shared: SharedTrainers, name: str) -> None:
        self._shared = shared
        self._name = name
        self.trainer = self._newest()

    @property
    def waits_for(self) -> str:
        """Resource for which the processes wait; see `TrainerProcesses.waits_for`."""
        return self._shared.processes.waits_for

    async def restart(self) -> TurnTrainer:
        """Restart the processes, and return the new trainer; see `TrainerProcesses.restart`."""
        await self._shared.restart(self._work)
        self.trainer = self._newest()
        return self.trainer

    def _newest(self) -> TurnTrainer:
        self._work = self._shared.work
        return TurnTrainer(self._shared.processes.adapters[self._name], self._shared.turns, self._work, self._name)

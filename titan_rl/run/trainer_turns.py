"""Trainer of one of several experiments, which takes turns with the others at the same processes."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan_rl.cluster.processes.roles import RespawnLimit, Respawns, Role
from titan_rl.core.errors import ActorDiedError, TrainingError
from titan_rl.scheduling.fair_turns import FairTurns
from titan_rl.training.data.sample import TrainingSample
from titan_rl.training.protocol import StepResult
from titan_rl.weights.types import Manifest

if TYPE_CHECKING:
    from titan_rl.cluster.processes.remote_process import RemoteProcess
    from titan_rl.cluster.trainer_processes import ActorTrainer, TrainerProcesses


class UnownedDeaths:
    """Counter of the deaths of the trainer's processes that no experiment has caused. The run has one.

    Args:
        max_respawns: `hosts.max_respawns`.
    """

    def __init__(self, max_respawns: int) -> None:
        self._respawns = Respawns({Role.TRAINER: RespawnLimit("hosts.max_respawns", max_respawns)})

    def note(self, why: str) -> str:
        """Count a death, and return the message about it.

        Raises:
            TrainingError: there were too many.
        """
        replaced, count = self._respawns.take(Role.TRAINER)
        text = f"{why}, at work for no adapter{count}"
        if not replaced:
            raise TrainingError(text)
        return text


class SharedWork:
    """Work of the trainer's processes, from a start of them to their end.

    A death counts for one experiment: the one for which they compute or, if they compute for none, the only one that
    has a call under way, such as the end of a save. Otherwise it counts for none, and is one of the run's.

    Args:
        remote: The processes.
        unowned: Counts the deaths that no experiment has caused.
    """

    def __init__(self, remote: RemoteProcess, unowned: UnownedDeaths) -> None:
        self.remote = remote
        self._unowned = unowned
        self._computes_for: str | None = None  # or did when they died
        self._calls: Counter[str] = Counter()  # outside of turns, by experiment; those at their death stay
        self._unowned_death: str | None = None  # its message

    @contextmanager
    def of(self, name: str, *, in_turn: bool) -> Generator[None]:
        """In the block, the processes work for an experiment.

        Args:
            in_turn: They compute for it; one block at a time. Otherwise threads of theirs finish what was begun.

        Raises:
            ActorDiedError: they have died before the block, which is excused, or in it.
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
        """Experiment for which a death counts; None if it counts for none."""
        if self._computes_for is not None:
            return self._computes_for
        calling = [name for name, count in self._calls.items() if count]
        return calling[0] if len(calling) == 1 else None

    def death(self, why: str, name: str) -> str:
        """Reason of their death as it is shown to an experiment.

        Raises:
            TrainingError: No experiment has caused it, and there were too many of these.
        """
        if self.remote.excused or self.cause == name:
            return why
        if self.cause is not None:
            return f"{why}, at work for {self.cause}"
        if self._unowned_death is None:
            self._unowned_death = self._unowned.note(why)
        return self._unowned_death


class TurnTrainer:
    """`Trainer` of one experiment that computes only in its turns. Copies are written outside of them.

    Args:
        trainer: of the experiment's adapter.
        name: of the experiment.
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
        """Whether the processes died because of their host, or not in the work of this experiment."""
        return self._trainer.excused or self._work.cause != self._name

    async def ended(self) -> str:
        """See `ActorTrainer.ended`.

        Raises:
            TrainingError: See `SharedWork.death`.
        """
        return self._work.death(await self._trainer.ended(), self._name)

    def end(self, reason: str) -> None:
        """See `ActorTrainer.end`."""
        self._trainer.end(reason)


class SharedTrainers:
    """Trainer processes of several experiments. The first experiment that notices their death restarts them.

    Args:
        processes: They have started.
        max_respawns: `hosts.max_respawns`, the limit of each experiment and of deaths that none has caused.
    """

    def __init__(self, processes: TrainerProcesses, turns: FairTurns, max_respawns: int) -> None:
        self.processes = processes
        self.turns = turns
        self._unowned = UnownedDeaths(max_respawns)
        self.work = SharedWork(processes.trainer.remote, self._unowned)
        self._restarting = asyncio.Lock()

    def of(self, name: str) -> TrainerShare:
        """The trainer of one experiment."""
        return TrainerShare(self, name)

    async def restart(self, dead: SharedWork) -> None:
        """Restart the processes, unless others have taken the place of the dead ones already.

        Raises:
            ActorDiedError: they do not start; no experiment has caused it.
            TrainingError: they have not started too often.
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
    """Trainer processes as the `RecoveringTrainer` of one experiment uses them.

    Attributes:
        trainer: The newest.
    """

    def __init__(self, shared: SharedTrainers, name: str) -> None:
        self._shared = shared
        self._name = name
        self.trainer = self._newest()

    @property
    def waits_for(self) -> str:
        """See `TrainerProcesses.waits_for`."""
        return self._shared.processes.waits_for

    async def restart(self) -> TurnTrainer:
        """See `TrainerProcesses.restart`."""
        await self._shared.restart(self._work)
        self.trainer = self._newest()
        return self.trainer

    def _newest(self) -> TurnTrainer:
        self._work = self._shared.work
        return TurnTrainer(self._shared.processes.adapters[self._name], self._shared.turns, self._work, self._name)

"""Trainer of one of several experiments, which takes turns with the others at the same processes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan_rl.core.errors import ActorDiedError
from titan_rl.scheduling.fair_turns import FairTurns
from titan_rl.training.data.sample import TrainingSample
from titan_rl.training.protocol import StepResult
from titan_rl.weights.types import Manifest

if TYPE_CHECKING:
    from titan_rl.cluster.processes.remote_process import RemoteProcess
    from titan_rl.cluster.trainer_processes import ActorTrainer, TrainerProcesses


class SharedWork:
    """Work of the trainer's processes, from a start of them to their end.

    If they die while they compute for one experiment, only that one counts the death, and not the others.

    Args:
        remote: The processes.
    """

    def __init__(self, remote: RemoteProcess) -> None:
        self.remote = remote
        self._doing: str | None = None  # experiment for which they compute, or did when they died

    @contextmanager
    def of(self, name: str) -> Generator[None]:
        """In the block, the processes compute for an experiment.

        Raises:
            ActorDiedError: they have died before the block, which is excused, or in it.
        """
        if self.remote.reason is not None:
            raise ActorDiedError(self.death(f"{self.remote.name} died: {self.remote.reason}", name), excused=True)
        self._doing = name
        try:
            yield
        except ActorDiedError as error:
            self.remote.end(str(error))
            raise
        finally:
            if self.remote.reason is None:
                self._doing = None

    def other_than(self, name: str) -> str | None:
        """Another experiment for which they compute, or did when they died; None if there is none."""
        return None if self._doing == name else self._doing

    def death(self, why: str, name: str) -> str:
        """Reason of their death as it is shown to an experiment."""
        other = self.other_than(name)
        return why if other is None else f"{why}, at work for {other}"


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
            with self._work.of(self._name):
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
        return await self._trainer.finish_publish()

    async def hold_published(self, version: int | None) -> bool:
        return await self._trainer.hold_published(version)

    async def begin_save(self, root: Path, run_state: dict[str, Any]) -> int:
        async with self._turn(urgent=True):
            return await self._trainer.begin_save(root, run_state)

    async def finish_save(self) -> None:
        await self._trainer.finish_save()

    async def load(self, checkpoint: Path) -> int:
        async with self._turn(urgent=True):
            return await self._trainer.load(checkpoint)

    async def export(self, path: Path) -> None:
        async with self._turn():
            await self._trainer.export(path)

    @property
    def excused(self) -> bool:
        """Whether the processes died because of their host, or in the work of another experiment."""
        return self._trainer.excused or self._work.other_than(self._name) is not None

    async def ended(self) -> str:
        """See `ActorTrainer.ended`."""
        return self._work.death(await self._trainer.ended(), self._name)

    def end(self, reason: str) -> None:
        """See `ActorTrainer.end`."""
        self._trainer.end(reason)


class SharedTrainers:
    """Trainer processes of several experiments. The first experiment that notices their death restarts them.

    Args:
        processes: They have started.
    """

    def __init__(self, processes: TrainerProcesses, turns: FairTurns) -> None:
        self.processes = processes
        self.turns = turns
        self.work = SharedWork(processes.trainer.remote)
        self._restarting = asyncio.Lock()

    def of(self, name: str) -> TrainerShare:
        """The trainer of one experiment."""
        return TrainerShare(self, name)

    async def restart(self, dead: SharedWork) -> None:
        """Restart the processes, unless others have taken the place of the dead ones already."""
        async with self._restarting:
            if self.work is dead:
                await self.processes.restart()
                self.work = SharedWork(self.processes.trainer.remote)


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

"""Trainer of one of several experiments, which takes turns with the others at the same processes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan_rl.scheduling.fair_turns import FairTurns
from titan_rl.training.data.sample import TrainingSample
from titan_rl.training.protocol import StepResult
from titan_rl.weights.types import Manifest

if TYPE_CHECKING:
    from titan_rl.cluster.trainer_processes import ActorTrainer, TrainerProcesses


class TurnTrainer:
    """`Trainer` of one experiment that computes only in its turns. Copies are written outside of them.

    Args:
        trainer: of the experiment's adapter.
        name: of the experiment.
    """

    def __init__(self, trainer: ActorTrainer, turns: FairTurns, name: str) -> None:
        self._trainer = trainer
        self._turns = turns
        self._name = name

    async def step(self, samples: Sequence[TrainingSample]) -> StepResult:
        async with self._turns.turn(self._name):
            return await self._trainer.step(samples)

    async def measure(self, samples: Sequence[TrainingSample]) -> float:
        async with self._turns.turn(self._name):
            return await self._trainer.measure(samples)

    async def begin_publish(self) -> None:
        async with self._turns.turn(self._name, urgent=True):
            await self._trainer.begin_publish()

    async def finish_publish(self) -> Manifest:
        return await self._trainer.finish_publish()

    async def hold_published(self, version: int | None) -> bool:
        return await self._trainer.hold_published(version)

    async def begin_save(self, root: Path, run_state: dict[str, Any]) -> int:
        async with self._turns.turn(self._name, urgent=True):
            return await self._trainer.begin_save(root, run_state)

    async def finish_save(self) -> None:
        await self._trainer.finish_save()

    async def load(self, checkpoint: Path) -> int:
        async with self._turns.turn(self._name, urgent=True):
            return await self._trainer.load(checkpoint)

    async def export(self, path: Path) -> None:
        async with self._turns.turn(self._name):
            await self._trainer.export(path)

    @property
    def excused(self) -> bool:
        """See `ActorTrainer.excused`."""
        return self._trainer.excused

    async def ended(self) -> str:
        """See `ActorTrainer.ended`."""
        return await self._trainer.ended()

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
        self._restarting = asyncio.Lock()

    def of(self, name: str) -> TrainerShare:
        """The trainer of one experiment."""
        return TrainerShare(self, name)

    async def restart(self, dead: object) -> None:
        """Restart the processes, unless others have taken the place of the dead ones already."""
        async with self._restarting:
            if self.processes.trainer.remote is dead:
                await self.processes.restart()


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
        await self._shared.restart(self._remote)
        self.trainer = self._newest()
        return self.trainer

    def _newest(self) -> TurnTrainer:
        processes = self._shared.processes
        self._remote = processes.trainer.remote
        return TurnTrainer(processes.adapters[self._name], self._shared.turns, self._name)

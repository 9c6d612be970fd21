"""What a checkpoint of a run holds, fixed while training stands."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from titan_rl.core.errors import CheckpointError
from titan_rl.generation.router.router import GeneratorRouter
from titan_rl.run.journal.run_journal import RunJournal
from titan_rl.run.journal.run_state import RunState
from titan_rl.scheduling.mix.task_mix import TaskMix
from titan_rl.scheduling.scheduler import GroupScheduler
from titan_rl.training.protocol import Trainer


class RunCopy:
    """Copies the weights with their place in the data, and begins the segment of the journal that follows them.

    Args:
        root: the folder of checkpoints.
    """

    def __init__(
        self,
        root: Path,
        trainer: Trainer,
        journal: RunJournal,
        mix: TaskMix,
        scheduler: GroupScheduler,
        router: GeneratorRouter,
    ) -> None:
        self._root = root
        self._trainer = trainer
        self._journal = journal
        self._mix = mix
        self._scheduler = scheduler
        self._router = router

    async def make(self, state: RunState) -> dict[str, Any]:
        """
        Args:
            state: of the run at the trainer's version; its place in the data comes from the journal.

        Returns:
            what the checkpoint holds as `run_state.json`.

        Raises:
            DataError: the state of a curriculum cannot be saved.
            CheckpointError: it cannot be copied, or the trainer is at another version.
        """
        tasks = self._mix.state()  # before anything is awaited: what happens from here on is in the new segment
        position = await self._journal.checkpoint(state.step, self._scheduler.next_index, self._router.tokens_so_far())
        placed = replace(state, next_index=position.next_index, unsettled=position.unsettled, tasks=tasks)
        run_state = asdict(placed)
        saved = await self._trainer.begin_save(self._root, run_state)
        if saved != state.step:
            raise CheckpointError(f"the trainer saves version {saved}, and the journal is that of version {state.step}")
        return run_state

"""What the steps since a checkpoint were trained on, to be trained on again."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Protocol

from titan_rl.config.run import RunConfig
from titan_rl.run.journal.run_journal import RunJournal
from titan_rl.run.journal.run_state import RunState
from titan_rl.run.stages.training_samples import training_samples
from titan_rl.scheduling.batches.batch import GroupBatch
from titan_rl.training.data.sample import TrainingSample


class TrainedSteps(Protocol):
    """Knows what each step of a run was trained on."""

    def since(self, checkpoint: Path | None, version: int) -> AsyncGenerator[Sequence[TrainingSample]]:
        """What the steps from a checkpoint to a version were given, one after the other.

        Args:
            checkpoint: None is the model as loaded.

        Raises:
            CheckpointError: that of a step is not to be had.
        """
        ...


class JournaledSteps:
    """`TrainedSteps` of a run of reinforcement learning: its journal has the groups of every batch.

    Args:
        folder: of the run.
    """

    def __init__(self, config: RunConfig, journal: RunJournal, folder: Path) -> None:
        self._config = config
        self._journal = journal
        self._folder = folder

    async def since(self, checkpoint: Path | None, version: int) -> AsyncGenerator[Sequence[TrainingSample]]:
        start = RunState.read(checkpoint or self._folder).position
        batches = await self._journal.trained_since(start, version)
        for step_from, groups in enumerate(batches, start.version):
            yield training_samples(self._config, GroupBatch(groups, step_from, {}, lambda: None))

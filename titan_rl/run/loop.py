"""Base of the training loops of `train` and `sft`: steps, checkpoints, and the end of a run."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

from titan_rl.config.run import RunConfig
from titan_rl.core.errors import NoSpaceError
from titan_rl.run.checkpoints.saver import CheckpointSaver, RunSaving
from titan_rl.run.directory import RunDirectory
from titan_rl.run.journal.state import RunState
from titan_rl.run.machine.requirements import checkpoint_bytes
from titan_rl.run.observability.progress import Progress
from titan_rl.run.observability.steps import LoopStages, Stage
from titan_rl.run.stages.training import SkippedSteps, TrainerCalls
from titan_rl.training.protocol import Trainer


class TrainingLoop(ABC):
    """Loop that trains steps and saves them. It closes nothing that it was given.

    Args:
        run_dir: Folder of the run, for checkpoints and the exported policy.
        state: State of the run at the version that the trainer has loaded.
        log: Called with (step, metrics) for every record.
    """

    def __init__(
        self,
        config: RunConfig,
        trainer: Trainer,
        *,
        run_dir: RunDirectory,
        state: RunState,
        log: Callable[[int, dict[str, float]], None],
        progress: Progress,
    ) -> None:
        self._config = config
        self._trainer = trainer
        self._run_dir = run_dir
        self._state = state
        self._log = log
        self._progress = progress
        self._calls = TrainerCalls(trainer)
        self._skipped = SkippedSteps(config.training.max_skipped_steps, progress)
        self._stages = LoopStages()
        saver = CheckpointSaver(
            config.checkpoint,
            run_dir.checkpoints,
            trainer,
            estimate=checkpoint_bytes(config),
            copy=self._copy,
            forget_before=self._forget_before,
            console=progress,
            version=state.step,
        )
        self._saving = RunSaving(saver, self._calls, progress, lambda: self.version)
        self.save_soon = self._saving.soon

    @property
    def version(self) -> int:
        """Version of the weights after the step that was trained last, as reported by the trainer."""
        return self._state.step

    @abstractmethod
    async def _copy(self, version: int) -> Mapping[str, Any]:
        """Have the trainer fix a version for a checkpoint, and return the state of the run that belongs to it."""

    def _forget_before(self, version: int) -> None:  # noqa: B027  a supervised run has nothing to delete
        """Delete records that only checkpoints before this version need."""

    def _wind_up(self) -> None:
        """Close the books of a run that fails or is stopped, once the trainer is at rest."""
        self._stages.enter(Stage.CHECKPOINT, self.version)

    @contextlib.asynccontextmanager
    async def _saved_at_the_end(self) -> AsyncGenerator[None]:
        """Save a checkpoint on every way out of the block that leaves a trained model."""
        try:
            yield
            self._stages.enter(Stage.CHECKPOINT, self.version)
            await self._saving.save_last()
        except NoSpaceError:  # of the last save
            raise
        except BaseException:
            await self._saving.save_what_is_trained(self._wind_up)
            raise

    async def _export(self) -> None:
        with self._progress.working(f"exporting the policy to {self._run_dir.export}"):
            await self._trainer.export(self._run_dir.export)

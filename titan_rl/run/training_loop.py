"""Base of the training loops of `train` and `sft`: steps, checkpoints, and the end of a run."""

from __future__ import annotations

import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping
from typing import Any, Generic, TypeVar

from titan_rl.config.run import RunConfig
from titan_rl.core.calls.user_code import reason
from titan_rl.core.errors import NoSpaceError
from titan_rl.metrics.sinks.types import MetricSink
from titan_rl.run.checkpoint_saver import CheckpointSaver
from titan_rl.run.checks.requirements import checkpoint_bytes
from titan_rl.run.directory import RunDirectory
from titan_rl.run.journal.state import RunState
from titan_rl.run.observability.progress import Progress
from titan_rl.run.observability.step_metrics import LoopStages, Stage
from titan_rl.run.stages.training import SkippedSteps, TrainerCalls
from titan_rl.training.trainer_protocol import Trainer

logger = logging.getLogger(__name__)

S = TypeVar("S")


class TrainingLoop(ABC, Generic[S]):
    """Loop that trains steps and saves checkpoints. It does not close the objects that it is given.

    Args:
        run_dir: Folder of the run, for checkpoints and the exported policy.
        state: State of the run at the version that the trainer has loaded.
        sinks: Sink for the metrics.
    """

    def __init__(
        self,
        config: RunConfig,
        trainer: Trainer,
        *,
        run_dir: RunDirectory,
        state: RunState,
        sinks: MetricSink,
        progress: Progress,
    ) -> None:
        self._config = config
        self._trainer = trainer
        self._run_dir = run_dir
        self._state = state
        self._sinks = sinks
        self._progress = progress
        self._calls = TrainerCalls(trainer)
        self._skipped = SkippedSteps(config.training.max_skipped_steps, progress)
        self._stages = LoopStages()
        self._saver = CheckpointSaver(
            self,
            self._calls,
            config.checkpoint,
            run_dir.checkpoints,
            estimate=checkpoint_bytes(config),
            progress=progress,
        )
        self.save_soon = self._saver.soon

    @property
    def version(self) -> int:
        """Version of the weights after the step that was trained last, as reported by the trainer."""
        return self._state.step

    @property
    @abstractmethod
    def held_out(self) -> Mapping[int, float]:
        """Held-out rewards by version; higher is better."""

    @abstractmethod
    async def run(self) -> S:
        """Train all remaining steps, export the policy, and return the summary of the run.

        Raises:
            TitanRLError: The error that ended the run.
        """

    @abstractmethod
    async def copy_state(self) -> Mapping[str, Any]:
        """Have the trainer copy its weights and state for a checkpoint, so that training may change them afterwards.
        Return the `run_state` that the trainer was given.

        Raises:
            CheckpointError: The state cannot be copied.
        """

    def forget_before(self, version: int) -> None:
        """Delete records that only checkpoints before a version need. A supervised run has none."""

    async def _before_checkpoint(self) -> None:
        """Wait until a checkpoint of the version may be written.

        Raises:
            TrainingError: The checkpoint may not be written.
        """

    def _wind_up(self) -> None:
        """Finish the records of a run that fails or is stopped, once the trainer is idle."""
        self._stages.enter(Stage.CHECKPOINT, self.version)

    @contextlib.asynccontextmanager
    async def _saved_at_the_end(self) -> AsyncGenerator[None]:
        """Save a checkpoint when the block ends, with or without an error, if it leaves a trained model."""
        try:
            yield
            self._stages.enter(Stage.CHECKPOINT, self.version)
            await self._saver.save_last()
        except NoSpaceError:  # raised by the last save
            raise
        except BaseException:
            await self._save_what_is_trained()
            raise

    async def _save_what_is_trained(self) -> None:
        """Save the trained version of a run that failed or was stopped. This raises nothing, so that the error that
        ended the run stays visible. The save takes as long as it needs; a second cancellation ends the wait."""
        try:
            if self._calls.running:
                logger.info("stopped at version %d, with the trainer at work: waiting for it to finish", self.version)
            await self._calls.wait()  # only then is the version known
            self._wind_up()
            if self.version:
                await self._before_checkpoint()
                await self._saver.save_last()
        except Exception as error:
            logger.warning("step %d is not saved", self.version, exc_info=error)
            self._progress.warning(f"step {self.version} is not saved: {reason(error)}")

    async def _export(self) -> None:
        with self._progress.working(f"exporting the policy to {self._run_dir.export}"):
            await self._trainer.export(self._run_dir.export)

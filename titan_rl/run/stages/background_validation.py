"""Validation of one version beside the training of later ones.

The version stays available in one of two ways:

    pinned       engines that can pin versions keep it besides the newest ones, and requests name it
    dedicated    one generator stays at this version and answers only validation requests, while the others go on

The trainer keeps the published version until the validation has ended, so that a generator that replaces a dead one can
load it: the death of a generator loses nothing. A checkpoint of a later version is written only after the validation
has ended. So a resumed run finds either the validation's metrics, or a checkpoint from which it reaches the version
again and validates it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from titan_rl.config.tasks import ResolvedSuite
from titan_rl.core.calls.user_code import reason
from titan_rl.core.errors import TitanRLError, TrainingError
from titan_rl.core.tracing.spans import span
from titan_rl.generation.router.router import GeneratorRouter
from titan_rl.run.observability.progress import Progress
from titan_rl.run.stages.validation import Validation
from titan_rl.training.protocol import HoldingTrainer, Trainer
from titan_rl.weights.types import PublishedWeights

CLOSE_TIMEOUT_S = 5.0

logger = logging.getLogger(__name__)


class BackgroundValidation:
    """Runner of validations beside training, one at a time.

    Args:
        published: Manifests of published versions, for the router's replicas.
        pins: Whether engines pin versions. Otherwise one generator is dedicated to the version.
    """

    def __init__(
        self,
        validation: Validation,
        trainer: Trainer,
        published: PublishedWeights,
        router: GeneratorRouter,
        progress: Progress,
        *,
        pins: bool,
    ) -> None:
        self._validation = validation
        self._trainer = trainer
        self._published = published
        self._router = router
        self._progress = progress
        self._pins = pins
        self._version: int | None = None  # version of the validation begun last
        self._task: asyncio.Task[None] | None = None
        self._alone: asyncio.Task[None] | None = None  # waits until the dedicated generator runs no training request

    async def begin(self, version: int, background: asyncio.TaskGroup) -> bool:
        """Begin the suites that are due, once the previous validation has ended. All generators must have the version.

        Args:
            background: Task group that an error of the validation fails. If it is cancelled, the validation continues.

        Returns:
            False, and nothing is begun, if the version cannot be kept. Then training has to wait for a validation.
        """
        await self.ended()
        suites = self._validation.due(version)
        if not suites:
            return True
        if (lacks := await self._keep(version)) is not None:
            self._progress.message(f"training waits for the validation at step {version}: {lacks}")
            return False
        self._version = version
        self._task = asyncio.create_task(self._run(version, suites), name=f"validation-{version}")
        background.create_task(self._fail_with(self._task), name=f"validation-{version}-ends")
        return True

    async def before_next_version(self) -> None:
        """Wait until the next version may be published: the dedicated generator, which must not load it, first finishes
        its training requests."""
        if self._alone is not None:
            await asyncio.wait([self._alone])

    async def before_checkpoint(self, version: int) -> None:
        """Wait until a checkpoint of a version may be written. If the run were killed, a checkpoint of a later version
        than the validated one would lose the validation.

        Raises:
            TrainingError: The validation has failed.
        """
        if self._task is None or self._version is None or version <= self._version:
            return
        if not self._task.done():
            self._progress.message(f"step {version} is saved once the validation at step {self._version} has ended")
        await self.ended()
        if (error := None if self._task.cancelled() else self._task.exception()) is not None or self._task.cancelled():
            raise TrainingError(
                f"the validation at step {self._version} has not ended"
                f"{'' if error is None else f' ({reason(error)})'}; --resume continues from the checkpoint before it, "
                "trains on the same groups again, and repeats it"
            ) from error

    async def ended(self) -> None:
        """Wait until the validation has ended or failed."""
        if self._task is not None:
            await asyncio.wait([self._task])

    async def close(self) -> None:
        """End a validation that is still running at the end of the run."""
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait([self._task], timeout=CLOSE_TIMEOUT_S)

    async def _keep(self, version: int) -> str | None:
        """Keep the version available. Return the reason if that is not possible, otherwise None."""
        if not isinstance(self._trainer, HoldingTrainer) or not await self._trainer.hold_published(version):
            return "the trainer or its transport cannot keep a published version"
        if self._pins:
            self._router.pin(version)
        elif not await self._router.dedicate_replica(version):
            await self._trainer.hold_published(None)
            return "too few generators serve to hold one"
        else:
            self._alone = asyncio.create_task(self._router.wait_dedicated(), name=f"dedicate-{version}")
        self._published.hold(version, pinned=self._pins)
        return None

    async def _run(self, version: int, suites: Sequence[ResolvedSuite]) -> None:
        try:
            with span("validation", "validation", lane="validation", step=version):
                await self._validation.run_suites(version, suites, beside_training=True)
        except Exception:  # a cancelled validation ends with the run, and everything that it keeps does, too
            await self._let_go()
            raise
        await self._let_go()

    async def _let_go(self) -> None:
        self._router.pin(None)
        self._published.let_go()
        await self._router.release_replica()
        assert isinstance(self._trainer, HoldingTrainer)
        try:
            await self._trainer.hold_published(None)
        except TitanRLError as error:  # a dead trainer holds nothing
            logger.warning("a published version is not released: %s", error)

    async def _fail_with(self, task: asyncio.Task[None]) -> None:
        await asyncio.wait([task])
        await task

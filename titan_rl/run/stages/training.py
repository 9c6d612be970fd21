"""Calls of the trainer that outlive a cancelled run, the count of skipped steps, and weight sync to the generators."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

from titan_rl.core.calls.cancellation import stray_cancellation_fails
from titan_rl.core.console import Console
from titan_rl.core.errors import StateDictError, TrainingError, listed
from titan_rl.core.tracing.spans import span
from titan_rl.generation.router.control import PullMode
from titan_rl.generation.router.router import GeneratorRouter
from titan_rl.run.trainer_recovery import RecoveringTrainer
from titan_rl.training.trainer_protocol import StepResult, Trainer
from titan_rl.weights.types import PublishedWeights

logger = logging.getLogger(__name__)

R = TypeVar("R")


class TrainerCalls:
    """Calls of the trainer, one at a time. The trainer finishes a call even if the caller is cancelled, and this class
    waits for its end, because the version is known only then.

    Args:
        trainer: Trainer that is called. It is also an attribute.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self._call: asyncio.Future[Any] | None = None

    @property
    def running(self) -> bool:
        return self._call is not None and not self._call.done()

    def waits_for(self) -> list[str]:
        """Describe what the trainer is doing, for messages about a stalled run."""
        if isinstance(self.trainer, RecoveringTrainer) and (lacks := self.trainer.waits_for()):
            return [lacks]
        return ["the trainer is at work"] * self.running

    async def finish(self, call: Coroutine[Any, Any, R]) -> R:
        """Await a call. If `finish` is cancelled, the call continues, and `wait` waits for it."""
        self._call = asyncio.ensure_future(call)
        with stray_cancellation_fails("a call of the trainer"):
            return await asyncio.shield(self._call)

    async def wait(self) -> None:
        """Wait at the end of a run until no call is running, and log the call's error. A dead trainer is not waited
        for, because a new host may take long to come, and the samples of its step are in the journal."""
        if isinstance(self.trainer, RecoveringTrainer):
            self.trainer.give_up()
        if self._call is None:
            return
        await asyncio.wait([self._call])
        if not self._call.cancelled() and (error := self._call.exception()) is not None:
            logger.warning("the trainer's last call failed: %r", error)


class SkippedSteps:
    """Counter of the steps of a run that were skipped, in whole or in part, which ends the run after too many.

    A skipped step results in a version like any other step, and its batch is not trained on again, even if the run is
    resumed.

    Attributes:
        count: Number of skipped steps since the run was started or resumed.

    Args:
        limit: Largest number of skipped steps: `training.max_skipped_steps`.
        console: Console for messages about skipped steps and the reasons.
    """

    def __init__(self, limit: int, console: Console) -> None:
        self._limit = limit
        self._console = console
        self._texts: list[str] = []

    @property
    def count(self) -> int:
        return len(self._texts)

    def note(self, result: StepResult) -> dict[str, str]:
        """Count and report a step if any part of it was skipped.

        Returns:
            Reasons why rollouts were not learned from, by rollout id.
        """
        if not result.skipped:
            return {}
        reasons: dict[str, str] = {}
        for part in result.skipped:
            reasons |= dict.fromkeys(part.rollout_ids, part.reason)
            reasons |= dict.fromkeys(part.at_fault, f"{part.reason}; this rollout's loss is not finite")
        texts = [f"{part.reason}; rollouts: {listed(part.at_fault or part.rollout_ids)}" for part in result.skipped]
        self._texts.append(f"step {result.version} is skipped: {'; '.join(texts)}")
        logger.warning(self._texts[-1])
        self._console.warning(f"{self._texts[-1]} ({self.count} of training.max_skipped_steps = {self._limit})")
        return reasons

    def check(self) -> None:
        """Check that not too many steps were skipped.

        Raises:
            TrainingError: More than `limit` steps were skipped. The message names the rollouts.
        """
        if self.count > self._limit:
            raise TrainingError(
                f"{self.count} steps were skipped, and training.max_skipped_steps = {self._limit}: "
                f"{'; '.join(self._texts)}. rollouts.jsonl has these rollouts. Look for extreme rewards or logprobs in "
                "them, or lower training.lr; --resume continues after them, and counts skipped steps from 0"
            )


class WeightSync:
    """Weight sync from the trainer to all generators, one version at a time.

    Args:
        published: Manifests of published versions, for the router's replicas.
        pull_mode: Effect of a pull on requests in flight; see `GeneratorRouter.pull_state_dict`.
    """

    def __init__(
        self, trainer: Trainer, published: PublishedWeights, router: GeneratorRouter, pull_mode: PullMode
    ) -> None:
        self._trainer = trainer
        self._published = published
        self._router = router
        self._pull_mode: PullMode = pull_mode
        self._is_unverified = False

    async def begin(self) -> None:
        """Have the trainer begin to publish its version. The next step may begin once this returns: it changes no
        weight before that weight is copied."""
        await self._trainer.begin_publish()

    async def finish(self, version: int) -> dict[str, float]:
        """Wait until every serving generator has pulled and verified the version begun last.

        Args:
            version: Version that the trainer reported.

        Returns:
            publish_s and pull_s, in seconds, and for each measurement of the generators the worst value.

        Raises:
            TrainingError: The trainer has published another version.
            StateDictError: The version cannot be published, or no generator can load it.
        """
        with span("sync", "sync", lane="sync", version=version):
            with span("publish", "sync", version=version) as publishing:
                manifest = await self._trainer.finish_publish()
            if manifest.version != version:
                raise TrainingError(
                    f"the trainer published version {manifest.version}, but the run is at version {version}"
                )
            self._published.announce(manifest)
            with span("pull", "sync", version=version) as pulling:
                await self._pull(version)
        figures = self._published.worst()
        self._log_unverified(version, figures.get("unverified_share", 0.0))
        return figures | {"publish_s": publishing.seconds, "pull_s": pulling.seconds}

    def _log_unverified(self, version: int, unverified: float) -> None:
        """Log when versions become unverified, and when they are verified again."""
        if unverified and not self._is_unverified:
            logger.warning(
                "version %d is unverified: no check has shown that the generators hold %.0f%% of its weights; see "
                "sync/unverified_share for the versions after it, and the generators' logs for the reason",
                *(version, 100 * unverified),
            )
        elif self._is_unverified and not unverified:
            logger.warning("version %d is verified again", version)
        self._is_unverified = bool(unverified)

    async def _pull(self, version: int) -> None:
        while True:
            manifest = self._published.manifest_of(version)
            try:
                await self._router.pull_state_dict(version, self._pull_mode)
            except StateDictError:
                await self._trainer.finish_publish()  # a restarted trainer publishes weights that were lost with it
                if self._published.manifest_of(version) is manifest:
                    raise
            else:
                return

"""Weight sync: the way of a version from the trainer to all generators."""

from __future__ import annotations

import logging

from titan_rl.core.errors import StateDictError, TrainingError
from titan_rl.core.tracing.spans import span
from titan_rl.generation.router.control import PullMode
from titan_rl.generation.router.router import GeneratorRouter
from titan_rl.training.protocol import Trainer
from titan_rl.weights.types import PublishedWeights

logger = logging.getLogger(__name__)


class WeightSync:
    """Publishes versions and has generators pull them, one after the other.

    Args:
        published: where the router's replicas find the manifests of published versions.
        pull_mode: what becomes of requests in flight, see `GeneratorRouter.pull_state_dict`.
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
        """Fix the trainer's version as the one to publish. The next step may begin; it waits for the copy before it
        changes a weight."""
        await self._trainer.begin_publish()

    async def finish(self, version: int) -> dict[str, float]:
        """Wait until every serving generator has pulled and verified the version begun last.

        Args:
            version: that the trainer said it has.

        Returns:
            publish_s, pull_s, and the worst of what the generators measured.

        Raises:
            TrainingError: what the trainer publishes is another version.
            StateDictError: it cannot be published, or nobody can load it.
        """
        with span("sync", "sync", lane="sync", version=version):
            return await self._finish(version)

    async def _finish(self, version: int) -> dict[str, float]:
        with span("publish", "sync", version=version) as publishing:
            manifest = await self._trainer.finish_publish()
        if manifest.version != version:
            raise TrainingError(f"the trainer publishes version {manifest.version} where the run is at {version}")
        self._published.announce(manifest)
        with span("pull", "sync", version=version) as pulling:
            await self._pull(version)
        figures = self._published.worst()
        self._tell(version, figures.get("unverified_share", 0.0))
        return figures | {"publish_s": publishing.seconds, "pull_s": pulling.seconds}

    def _tell(self, version: int, unverified: float) -> None:
        """Say in the log when versions begin to be unverified, and when they are verified again."""
        if unverified and not self._is_unverified:
            logger.warning(
                "version %d is unverified: nothing has shown that the generators hold %.0f%% of its weights; "
                "sync/unverified_share says how long that goes on, the generators' logs why",
                *(version, 100 * unverified),
            )
        elif self._is_unverified and not unverified:
            logger.warning("version %d is verified; those before it were not", version)
        self._is_unverified = bool(unverified)

    async def _pull(self, version: int) -> None:
        while True:
            manifest = self._published.manifest_of(version)
            try:
                await self._router.pull_state_dict(version, self._pull_mode)
            except StateDictError:
                await self._trainer.finish_publish()  # one that died with the weights is back, and has them again
                if self._published.manifest_of(version) is manifest:
                    raise
            else:
                return

"""Failed replicas leave service, and come back when they hold the current weights."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from titan_rl.generation.router.background_tasks import BackgroundTasks
from titan_rl.generation.router.limits import Limits
from titan_rl.generation.router.pool import Pool, PooledReplica
from titan_rl.generation.router.replica import Replica

logger = logging.getLogger(__name__)

OnReplicaFailed = Callable[[Replica, Exception], None]


class Health:
    """Quarantines a replica at its first infrastructure failure and brings it up again in the background.

    A replica that fails again before it has answered a request waits twice as long, so that one which fails fast
    draws a request now and then and no more.

    Args:
        prepare: brings a replica to the current version and pause state; raises when it cannot.
        prepared: whether it is there now.
        on_failed: told of each quarantine, so that a supervisor can replace the replica.
    """

    def __init__(
        self,
        pool: Pool,
        tasks: BackgroundTasks,
        limits: Limits,
        *,
        prepare: Callable[[PooledReplica], Awaitable[None]],
        prepared: Callable[[PooledReplica], bool],
        on_failed: OnReplicaFailed | None,
    ) -> None:
        self._pool = pool
        self._tasks = tasks
        self._limits = limits
        self._prepare = prepare
        self._prepared = prepared
        self._on_failed = on_failed
        self._recovering: set[PooledReplica] = set()

    def quarantine(self, replica: PooledReplica, error: Exception, epoch: int | None = None) -> None:
        """Out of service because of `error`.

        Args:
            epoch: the replica's epoch when the failed call began; a failure from before its last admission is ignored.
        """
        is_out = replica in self._recovering and not replica.serving
        if replica.removed or is_out or (epoch is not None and epoch != replica.epoch):
            return
        replica.failures += 1
        replica.last_error = self._pool.last_error = error
        logger.warning("replica %s is out of service: %r", replica.name, error)
        self.take_out(replica)
        if self._on_failed is not None:
            try:
                self._on_failed(replica.handle, error)
            except Exception:
                logger.exception("on_replica_failed raised for replica %s", replica.name)

    def take_out(self, replica: PooledReplica) -> None:
        """Out of service until it has pulled the current version, without blame."""
        self._pool.withdraw(replica)
        replica.version = None
        if replica not in self._recovering and not replica.removed:
            self._recovering.add(replica)
            self._tasks.start(self._recover(replica), f"recover {replica.name}")

    async def bring_up(self, replica: PooledReplica) -> None:
        """Into service, with the current weights and pause state.

        Raises:
            Exception: whatever the replica fails with.
        """
        while not self._prepared(replica):
            await self._prepare(replica)
        self._pool.admit(replica)  # no await since the check

    async def _recover(self, replica: PooledReplica) -> None:
        try:
            while not (replica.serving or replica.removed):
                doubled = self._limits.quarantine_s * 2 ** min(max(replica.failures - 1, 0), 30)
                await asyncio.sleep(min(doubled, self._limits.max_quarantine_s))
                try:
                    await self.bring_up(replica)
                except Exception as error:
                    replica.failures += 1
                    replica.last_error = self._pool.last_error = error
                    logger.warning("replica %s stays out of service: %r", replica.name, error)
                else:
                    logger.info("replica %s serves again", replica.name)
        finally:
            self._recovering.discard(replica)

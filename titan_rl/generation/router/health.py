"""Failed replicas leave service, and come back when they hold the current weights."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from titan_rl.generation.router.limits import Limits
from titan_rl.generation.router.member import Member
from titan_rl.generation.router.pool import Pool
from titan_rl.generation.router.replica import Replica
from titan_rl.generation.router.tasks import TaskSet

logger = logging.getLogger(__name__)

OnReplicaFailed = Callable[[Replica, Exception], None]


class Health:
    """Quarantines a member at its first infrastructure failure and brings it up again in the background.

    A member that fails again before it has answered a request waits twice as long, so that one which fails fast
    draws a request now and then and no more.

    Args:
        prepare: brings a member to the current version and pause state; raises when it cannot.
        prepared: whether it is there now.
        on_failed: told of each quarantine, so that a supervisor can replace the replica.
    """

    def __init__(
        self,
        pool: Pool,
        tasks: TaskSet,
        limits: Limits,
        *,
        prepare: Callable[[Member], Awaitable[None]],
        prepared: Callable[[Member], bool],
        on_failed: OnReplicaFailed | None,
    ) -> None:
        self._pool = pool
        self._tasks = tasks
        self._limits = limits
        self._prepare = prepare
        self._prepared = prepared
        self._on_failed = on_failed
        self._recovering: set[Member] = set()

    def quarantine(self, member: Member, error: Exception, epoch: int | None = None) -> None:
        """Out of service because of `error`.

        Args:
            epoch: the member's epoch when the failed call began; a failure from before its last admission is ignored.
        """
        is_out = member in self._recovering and not member.serving
        if member.removed or is_out or (epoch is not None and epoch != member.epoch):
            return
        member.failures += 1
        member.last_error = self._pool.last_error = error
        logger.warning("replica %s is out of service: %r", member.name, error)
        self.take_out(member)
        if self._on_failed is not None:
            try:
                self._on_failed(member.replica, error)
            except Exception:
                logger.exception("on_replica_failed raised for replica %s", member.name)

    def take_out(self, member: Member) -> None:
        """Out of service until it has pulled the current version, without blame."""
        self._pool.withdraw(member)
        member.draining = False
        member.version = None
        if member not in self._recovering and not member.removed:
            self._recovering.add(member)
            self._tasks.start(self._recover(member), f"recover {member.name}")

    async def bring_up(self, member: Member) -> None:
        """Into service, with the current weights and pause state.

        Raises:
            Exception: whatever the replica fails with.
        """
        while not self._prepared(member):
            await self._prepare(member)
        self._pool.admit(member)  # no await since the check

    async def _recover(self, member: Member) -> None:
        try:
            while not (member.serving or member.removed):
                doubled = self._limits.quarantine_s * 2 ** min(max(member.failures - 1, 0), 30)
                await asyncio.sleep(min(doubled, self._limits.max_quarantine_s))
                try:
                    await self.bring_up(member)
                except Exception as error:
                    member.failures += 1
                    member.last_error = self._pool.last_error = error
                    logger.warning("replica %s stays out of service: %r", member.name, error)
                else:
                    logger.info("replica %s serves again", member.name)
        finally:
            self._recovering.discard(member)

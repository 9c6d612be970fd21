"""Bringing new weights to every replica, while some of them always serve."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from titan_rl.calls.bounded import limited
from titan_rl.errors import StateDictError
from titan_rl.generation.router.in_flight import RequestsInFlight
from titan_rl.generation.router.limits import Limits
from titan_rl.generation.router.pool import Pool, PooledReplica

logger = logging.getLogger(__name__)

PullMode = Literal["hot_swap", "drain"]
"""Pull between the tokens of running requests, or after a replica's requests have finished."""


@dataclass(frozen=True, slots=True)
class PullReport:
    """Which replicas hold the version or a newer one: `PullReport(7, ("a",), {"b": StateDictError(...)})`."""

    version: int
    pulled: tuple[str, ...]
    failed: Mapping[str, Exception]  # by name; out of service until they have pulled the current version
    aborted: tuple[str, ...] = ()  # ids of requests that did not finish within `drain_s`


class Puller:
    """Holds the version that every replica is brought to. Only ever the newest is pulled; older calls ride along.

    Args:
        quarantine, take_out, bring_up: of `Health`.
    """

    def __init__(
        self,
        pool: Pool,
        requests: RequestsInFlight,
        limits: Limits,
        *,
        quarantine: Callable[[PooledReplica, Exception], None],
        take_out: Callable[[PooledReplica], None],
        bring_up: Callable[[PooledReplica], Awaitable[None]],
    ) -> None:
        self.target: int | None = None
        self._pool = pool
        self._requests = requests
        self._limits = limits
        self._quarantine = quarantine
        self._take_out = take_out
        self._bring_up = bring_up
        self._draining = asyncio.Lock()

    def applied(self, replica: PooledReplica) -> bool:
        return self.target is None or (replica.version is not None and replica.version >= self.target)

    async def apply(self, replica: PooledReplica) -> None:
        """Bring one replica to the newest version.

        Raises:
            OutOfTimeError: it takes longer than `pull_s`.
            Exception: whatever the replica fails with.
        """
        async with replica.pulling:
            while self.target is not None and not self.applied(replica):
                version = self.target
                async with limited(self._limits.pull_s, f"the pull of version {version}"):
                    replica.version = await replica.calls.pull(version)
                replica.hear()

    async def pull(self, version: int, mode: PullMode) -> PullReport:
        if mode not in get_args(PullMode):
            raise ValueError(f"pull mode is {mode!r}; it must be one of {', '.join(get_args(PullMode))}")
        if self.target is None or version > self.target:
            self.target = version
        failed: dict[str, Exception] = {}
        aborted: list[str] = []
        if mode == "hot_swap":
            await asyncio.gather(
                *(self._update(replica, self.apply, failed) for replica in self._pool if replica.serving)
            )
        else:
            async with self._draining:  # rolling: one replica at a time, the least busy first
                while stale := [replica for replica in self._pool if replica.serving and not self.applied(replica)]:
                    replica = min(stale, key=lambda replica: replica.load)
                    await self._update(replica, lambda replica: self._drain(replica, aborted), failed)
        if not any(replica.serving and self.applied(replica) for replica in self._pool):
            await self._wait_for_one(version, failed)
        pulled = tuple(replica.name for replica in self._pool if replica.serving and self.applied(replica))
        return PullReport(version, pulled, failed, tuple(aborted))

    async def _update(
        self, replica: PooledReplica, update: Callable[[PooledReplica], Awaitable[None]], failed: dict[str, Exception]
    ) -> None:
        try:
            await update(replica)
        except Exception as error:
            failed[replica.name] = error
            self._quarantine(replica, error)
        except asyncio.CancelledError:
            self._take_out(replica)  # it may hold either version
            raise

    async def _drain(self, replica: PooledReplica, aborted: list[str]) -> None:
        self._pool.withdraw(replica)
        replica.draining = True
        try:
            await self._requests.wait(self._limits.drain_s, replica.idle.wait())
        except TimeoutError:
            late = self._requests.on(replica)
            logger.warning("replica %s did not drain; aborting %d requests", replica.name, len(late))
            aborted += [request.request_id for request in late]
            await self._requests.abort(late)
        await self._bring_up(replica)

    async def _wait_for_one(self, version: int, failed: Mapping[str, Exception]) -> None:
        """Replicas that recover or join enter service with the version; weights nobody can load are not waited for."""
        cause = next((error for error in failed.values() if isinstance(error, StateDictError)), None)
        if cause is None:
            try:
                async with asyncio.timeout(self._limits.no_replica_s):
                    await self._pool.serving.wait()
                return
            except TimeoutError:
                cause = self._pool.last_error
        raise StateDictError(f"no replica serves with version {version}: {cause!r}") from cause

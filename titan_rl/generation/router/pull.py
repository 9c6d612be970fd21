"""Bringing new weights to every replica, while some of them always serve."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from titan_rl.core.calls.bounded import limited
from titan_rl.core.errors import StateDictError, UnavailableWeightsError
from titan_rl.generation.router.health import Health
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
    """Holds the version that every replica is brought to. Only ever the newest is pulled; older calls ride along."""

    def __init__(self, pool: Pool, requests: RequestsInFlight, limits: Limits, health: Health) -> None:
        self.target: int | None = None
        self._loaded: int | None = None  # the newest that a replica has pulled
        self._pool = pool
        self._requests = requests
        self._limits = limits
        self._health = health
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
                self._loaded = max(version, self._loaded or 0)
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
                while stale := self._stale(failed):
                    replica = min(stale, key=lambda replica: replica.load)
                    await self._update(replica, lambda replica: self._drain(replica, aborted), failed)
        self._settle(version, failed)
        if not any(replica.serving and self.applied(replica) for replica in self._pool):
            await self._wait_for_one(version, failed)
        pulled = tuple(replica.name for replica in self._pool if replica.serving and self.applied(replica))
        return PullReport(version, pulled, failed, tuple(aborted))

    def _stale(self, failed: Mapping[str, Exception]) -> list[PooledReplica]:
        return [
            replica
            for replica in self._pool
            if replica.serving and not self.applied(replica) and replica.name not in failed
        ]

    async def _update(
        self, replica: PooledReplica, update: Callable[[PooledReplica], Awaitable[None]], failed: dict[str, Exception]
    ) -> None:
        try:
            await update(replica)
        except UnavailableWeightsError as error:
            failed[replica.name] = error  # it is as it was; whether it may stay so, `_settle` says
        except Exception as error:
            failed[replica.name] = error
            self._health.quarantine(replica, error)
        except asyncio.CancelledError:
            self._health.take_out(replica)  # it may hold either version
            raise

    def _settle(self, version: int, failed: Mapping[str, Exception]) -> None:
        """What becomes of replicas that found no such version: where none has it they serve on with what they have.

        Raises:
            UnavailableWeightsError: none has it, and it is not waited for.
        """
        without = {
            replica: error
            for replica in self._pool
            if isinstance(error := failed.get(replica.name), UnavailableWeightsError) and not self.applied(replica)
        }
        if without and self._give_up(version):
            for replica in without:
                self._pool.admit(replica)
            cause = next(iter(without.values()))
            raise UnavailableWeightsError(f"no replica could get version {version}: {cause}") from cause
        for replica, error in without.items():
            self._health.quarantine(replica, error)

    def _give_up(self, version: int) -> bool:
        """Expect the version from before again, unless a replica has this one, or a newer one is asked for."""
        if self.target != version or (self._loaded is not None and self._loaded >= version):
            return False
        self.target = self._loaded
        return True

    async def _drain(self, replica: PooledReplica, aborted: list[str]) -> None:
        self._pool.withdraw(replica, draining=True)
        try:
            await self._requests.wait(self._limits.drain_s, replica.idle.wait())
        except TimeoutError:
            late = self._requests.on(replica)
            logger.warning("replica %s did not drain; aborting %d requests", replica.name, len(late))
            aborted += [request.request_id for request in late]
            await self._requests.abort(late)
        await self._health.bring_up(replica)

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
                self._give_up(version)
        raise StateDictError(f"no replica serves with version {version}: {cause!r}") from cause

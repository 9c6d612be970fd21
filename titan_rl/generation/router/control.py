"""Control operations on all replicas: pause and resume, and pulls of new weights."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from titan_rl.core.errors import StateDictError, UnavailableWeightsError
from titan_rl.generation.router.pool import Pool, PooledReplica, Service
from titan_rl.generation.router.requests import NotResumedError, RequestsInFlight
from titan_rl.generation.router.shard_control import Shards
from titan_rl.generation.types import PauseMode


@dataclass(frozen=True, slots=True)
class PauseReport:
    """Duration of a pause, and the requests and replicas that exceeded its limits.

    Example: `PauseReport("wait", 300.2, aborted=("g1/0/2",), cancelled=(), failed={})`
    """

    mode: PauseMode
    seconds: float
    aborted: tuple[str, ...]  # ids of requests that were ended early
    cancelled: tuple[str, ...]  # ids of aborted requests that did not return in time, and lost their tokens
    failed: Mapping[str, Exception]  # replicas that did not pause, by name; they are out of service


class Pause:
    """Pauses and resumes all replicas. Requests wait while `open` is not set.

    The mode changes as soon as a call begins; `open` is set again when a resume has reached all replicas.
    """

    def __init__(self, pool: Pool, requests: RequestsInFlight, shards: Shards) -> None:
        self.open = asyncio.Event()
        self.open.set()
        self.changing = asyncio.Lock()
        self._pool = pool
        self._shards = shards
        self._target = pool.target
        self._requests = requests
        self._limits = pool.limits

    async def pause(self, mode: PauseMode) -> PauseReport:
        if self._target.mode is not None:
            raise RuntimeError(f"the router is paused already, in mode '{self._target.mode}'; resume it first")
        started = asyncio.get_running_loop().time()
        self._target.mode = mode  # before any engine pauses, so that no request is sent meanwhile
        self.open.clear()
        aborted = list(self._requests) if mode.ends_requests else []
        for request in aborted:
            request.aborted = True
        async with self.changing:
            in_shards = asyncio.ensure_future(self._shards.pause(mode))
            try:
                if mode is PauseMode.KEEP:
                    self._requests.freeze(self._limits.paused_s)
                elif mode is PauseMode.WAIT and not await self._all_idle():
                    aborted = [request for request in self._requests if request.replica is not None]
                cancelled = await self._requests.abort(aborted)
                ended = await in_shards  # from here on no shard sends requests, so the engines can be paused
            finally:
                in_shards.cancel()
            failed = await self._apply_to_all()
            if failed:
                await self._shards.settle()
        seconds = asyncio.get_running_loop().time() - started
        aborted_ids = (*(request.request_id for request in aborted), *ended.aborted)
        return PauseReport(mode, seconds, aborted_ids, (*cancelled, *ended.cancelled), failed)

    async def resume(self) -> None:
        async with self.changing:  # waits for a pause in progress
            if self._target.mode is None:
                raise RuntimeError("the router is not paused; there is nothing to resume")
            self._target.mode = None
            try:
                await self._apply_to_all()
                await self._shards.resume()
            finally:  # a replica that missed the resume is resumed before its next use; the waiting requests continue
                self._open_gate()

    async def wait_open(self) -> None:
        try:
            async with asyncio.timeout(self._limits.paused_s):
                await self.open.wait()
        except TimeoutError:
            raise self.not_resumed() from None

    def not_resumed(self) -> NotResumedError:
        return NotResumedError(f"the router was not resumed within {self._limits.paused_s:g} s")

    def _open_gate(self) -> None:
        if self._target.mode is not None:  # paused again while the replicas were resuming
            return
        self._requests.thaw()
        self.open.set()
        self._pool.on_room()

    async def _apply_to_all(self) -> dict[str, Exception]:
        """Set the pause mode of all replicas. Replicas out of service get it when they recover."""
        replicas = [replica for replica in self._pool if replica.healthy]
        pauses = [self._target.pause(replica) for replica in replicas]
        results = await asyncio.gather(*pauses, return_exceptions=True)
        failed: dict[str, Exception] = {}
        for replica, result in zip(replicas, results, strict=True):
            if isinstance(result, Exception):
                failed[replica.name] = result
                self._pool.quarantine(replica, result)
        return failed

    async def _all_idle(self) -> bool:
        """Wait until no replica runs a request. Idle replicas stay idle, because requests wait for `open`."""
        try:
            async with asyncio.timeout(self._limits.finish_s):
                for replica in self._pool:
                    await replica.idle.wait()
        except TimeoutError:
            return False
        return True


logger = logging.getLogger(__name__)

PullMode = Literal["hot_swap", "drain"]
"""Pull between the tokens of running requests, or after a replica's requests have finished."""


@dataclass(frozen=True, slots=True)
class PullReport:
    """Outcome of a pull on each replica.

    Example: `PullReport(7, ("a",), {"b": StateDictError(...)})`
    """

    version: int
    pulled: tuple[str, ...]
    failed: Mapping[str, Exception]  # replicas by name; out of service until they have pulled the current version
    aborted: tuple[str, ...] = ()  # ids of requests that did not finish within `drain_s`


class Puller:
    """Pulls the newest version on all replicas. Calls for an older version return with the newest one."""

    def __init__(self, pool: Pool, requests: RequestsInFlight, shards: Shards) -> None:
        self._pool = pool
        self._target = pool.target
        self._requests = requests
        self._shards = shards
        self._draining = asyncio.Lock()

    async def pull(self, version: int, mode: PullMode) -> PullReport:
        if mode not in get_args(PullMode):
            raise ValueError(f"pull mode is {mode!r}; it must be one of {', '.join(get_args(PullMode))}")
        target = self._target
        if target.version is None or version > target.version:
            target.version = version
        failed: dict[str, Exception] = {}
        aborted: list[str] = []
        if mode == "hot_swap":
            await asyncio.gather(*(self._update(replica, failed) for replica in self._pool if replica.serving))
        else:
            async with self._draining:  # rolling: one replica at a time, the least busy first
                while stale := self._stale(failed):
                    replica = min(stale, key=lambda replica: replica.load)
                    await self._update(replica, failed, drained=aborted)
        self._handle_unavailable(version, failed)
        if not self._pulled():
            await self._wait_for_one(version, failed)
        await self._shards.settle()  # then no shard sends to a replica with the old version
        return PullReport(version, self._pulled(), failed, tuple(aborted))

    def _pulled(self) -> tuple[str, ...]:
        return tuple(replica.name for replica in self._pool if replica.serving and self._target.has_version(replica))

    def _stale(self, failed: Mapping[str, Exception]) -> list[PooledReplica]:
        return [
            replica
            for replica in self._pool
            if replica.serving and not self._target.has_version(replica) and replica.name not in failed
        ]

    async def _update(
        self, replica: PooledReplica, failed: dict[str, Exception], *, drained: list[str] | None = None
    ) -> None:
        """Pull on one replica, and note its failure.

        Args:
            failed: Receives the error of the replica by its name.
            drained: Receives the ids of requests that had to be aborted in mode "drain". None stands for "hot_swap".
        """
        try:
            if drained is None:
                await self._target.pull(replica)
            else:
                drained += await self._drain(replica)
                await self._pool.bring_up(replica)
        except UnavailableWeightsError as error:
            failed[replica.name] = error  # its weights are untouched; `_handle_unavailable` decides whether it serves
        except Exception as error:
            failed[replica.name] = error
            self._pool.quarantine(replica, error)
        except asyncio.CancelledError:
            self._pool.take_out(replica)  # it may have the old or the new version
            raise

    def _handle_unavailable(self, version: int, failed: Mapping[str, Exception]) -> None:
        """Quarantine the replicas that could not get the version. If no replica has it, all keep the old version.

        Raises:
            UnavailableWeightsError: no replica has the version, and the pull is abandoned.
        """
        without = {
            replica: error
            for replica in self._pool
            if isinstance(error := failed.get(replica.name), UnavailableWeightsError)
            and not self._target.has_version(replica)
        }
        if without and self._abandon(version):
            for replica in without:
                self._pool.admit(replica)
            cause = next(iter(without.values()))
            raise UnavailableWeightsError(f"no replica could get version {version}: {cause}") from cause
        for replica, error in without.items():
            self._pool.quarantine(replica, error)

    def _abandon(self, version: int) -> bool:
        """Return to the previous version, unless a replica has loaded this one or a newer one was requested."""
        target = self._target
        if target.version != version or (target.loaded is not None and target.loaded >= version):
            return False
        target.version = target.loaded
        return True

    async def _drain(self, replica: PooledReplica) -> list[str]:
        """Take a replica out of service until its requests have finished. Returns the ids of requests that had to be
        aborted."""
        self._pool.withdraw(replica, Service.DRAINING)
        drain_s = self._pool.limits.drain_s
        own, of_shards = await asyncio.gather(
            self._requests.drain(replica, drain_s), self._shards.drain(replica, drain_s, abort=True)
        )
        return [*own, *of_shards]

    async def _wait_for_one(self, version: int, failed: Mapping[str, Exception]) -> None:
        """Wait for a replica that recovers or joins, which then has the version. If a replica could not load the
        version, fail at once instead.

        Raises:
            StateDictError: no replica serves with the version.
        """
        cause = next((error for error in failed.values() if isinstance(error, StateDictError)), None)
        if cause is None:
            try:
                async with asyncio.timeout(self._pool.limits.no_replica_s):
                    await self._pool.serving.wait()
                return
            except TimeoutError:
                cause = self._pool.last_error
                self._abandon(version)
        raise StateDictError(f"no replica serves with version {version}: {cause!r}") from cause

"""Control operations on all replicas: pause and resume, and pulls of new weights."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Literal, get_args

from titan_rl.core.calls.bounded import limited
from titan_rl.core.errors import EngineDeadError, StateDictError, UnavailableWeightsError
from titan_rl.generation.router.health import Health
from titan_rl.generation.router.pool import Pool, PooledReplica
from titan_rl.generation.router.replica import Limits
from titan_rl.generation.router.requests import NotResumedError, RequestsInFlight
from titan_rl.generation.types import PauseMode


class ControlCalls:
    """Control calls in progress: pulls, pauses, aborts."""

    def __init__(self) -> None:
        self._ended: EngineDeadError | None = None
        self._under_way: set[asyncio.Timeout] = set()

    @asynccontextmanager
    async def one(self) -> AsyncGenerator[None]:
        """The block is a call.

        Raises:
            EngineDeadError: by the block, that of `end`, before it or while it runs.
        """
        if self._ended is not None:
            raise self._ended
        async with asyncio.timeout(None) as scope:
            self._under_way.add(scope)
            try:
                yield
            except asyncio.CancelledError:
                if scope.expired() and self._ended is not None:
                    raise self._ended from None
                raise
            finally:
                self._under_way.discard(scope)

    def end(self, reason: EngineDeadError) -> bool:
        """From now on calls fail with `reason`. False where they do already: the first one stands."""
        if self._ended is not None:
            return False
        self._ended = reason
        for scope in self._under_way:
            scope.reschedule(asyncio.get_running_loop().time())
        return True


@dataclass(frozen=True, slots=True)
class PauseReport:
    """Duration of a pause, and the requests and replicas that it gave up on: `PauseReport("wait", 300.2,
    aborted=("g1/0/2",), cancelled=(), failed={})`."""

    mode: PauseMode
    seconds: float
    aborted: tuple[str, ...]  # ids of requests it ended early
    cancelled: tuple[str, ...]  # those of them that did not return, and lost their tokens
    failed: Mapping[str, Exception]  # replicas that did not pause, by name; they are out of service


class Pause:
    """The pause state that every replica is brought to, and the gate that requests wait at.

    `mode` is what is wanted from the moment of the call; `open` is set again when a resume has reached all.
    """

    def __init__(
        self,
        pool: Pool,
        requests: RequestsInFlight,
        limits: Limits,
        quarantine: Callable[[PooledReplica, Exception], None],
    ) -> None:
        self.mode: PauseMode | None = None
        self.open = asyncio.Event()
        self.open.set()
        self._pool = pool
        self._requests = requests
        self._limits = limits
        self._quarantine = quarantine
        self._changing = asyncio.Lock()

    async def pause(self, mode: PauseMode) -> PauseReport:
        if self.mode is not None:
            raise RuntimeError(f"the router is paused already, in mode '{self.mode}'; resume it first")
        started = asyncio.get_running_loop().time()
        self.mode = mode  # before any engine is told, so that nothing arrives behind its back
        self.open.clear()
        aborted = list(self._requests) if mode.ends_requests else []
        for request in aborted:
            request.aborted = True
        async with self._changing:
            if mode is PauseMode.KEEP:
                self._requests.freeze(self._limits.paused_s)
            elif mode is PauseMode.WAIT and not await self._all_idle():
                aborted = [request for request in self._requests if request.replica is not None]
            cancelled = await self._requests.abort(aborted)
            failed = await self._apply_to_all()
        seconds = asyncio.get_running_loop().time() - started
        return PauseReport(mode, seconds, tuple(request.request_id for request in aborted), cancelled, failed)

    async def resume(self) -> None:
        async with self._changing:  # a pause under way ends first
            if self.mode is None:
                raise RuntimeError("the router is not paused; there is nothing to resume")
            self.mode = None
            try:
                await self._apply_to_all()
            finally:  # a replica that was not told is told when it is used again; who waits here must go on
                self._open_gate()

    async def wait_open(self) -> None:
        try:
            async with asyncio.timeout(self._limits.paused_s):
                await self.open.wait()
        except TimeoutError:
            raise self.not_resumed() from None

    def not_resumed(self) -> NotResumedError:
        return NotResumedError(f"the router was not resumed within {self._limits.paused_s:g} s")

    def applied(self, replica: PooledReplica) -> bool:
        return replica.paused == self.mode

    async def apply(self, replica: PooledReplica) -> None:
        """Bring one replica to the wanted pause state.

        Raises:
            OutOfTimeError: it takes longer than `call_s`.
            Exception: whatever the replica fails with.
        """
        async with replica.pausing:
            while not self.applied(replica):
                wanted, before = self.mode, replica.paused
                replica.paused = "unknown"
                change = "the resume" if wanted is None else f'the pause in mode "{wanted}"'
                async with limited(self._limits.call_s, change):
                    if before is not None:
                        await replica.calls.resume()
                    if wanted is not None:
                        await replica.calls.pause(wanted)
                replica.paused = wanted

    def _open_gate(self) -> None:
        if self.mode is not None:  # paused again while the replicas were resuming
            return
        self._requests.thaw()
        self.open.set()
        self._pool.has_room()

    async def _apply_to_all(self) -> dict[str, Exception]:
        """Members out of service are left to their recovery, which ends in the wanted state too."""
        replicas = [replica for replica in self._pool if replica.serving or replica.draining]
        results = await asyncio.gather(*(self.apply(replica) for replica in replicas), return_exceptions=True)
        failed: dict[str, Exception] = {}
        for replica, result in zip(replicas, results, strict=True):
            if isinstance(result, Exception):
                failed[replica.name] = result
                self._quarantine(replica, result)
        return failed

    async def _all_idle(self) -> bool:
        """Wait until no replica runs a request; the closed gate keeps those idle that are."""
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
    """Outcome of a pull on each replica: `PullReport(7, ("a",), {"b": StateDictError(...)})`."""

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
        """Decide about replicas that could not get the version: if no replica has it, they go on serving the old one.

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

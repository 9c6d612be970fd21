"""Pausing every replica, those that join meanwhile included."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from titan_rl.core.calls.bounded import limited
from titan_rl.generation.router.in_flight import RequestsInFlight
from titan_rl.generation.router.limits import Limits
from titan_rl.generation.router.pool import Pool, PooledReplica
from titan_rl.generation.router.waiter import NotResumedError
from titan_rl.generation.types import PauseMode


@dataclass(frozen=True, slots=True)
class PauseReport:
    """What a pause took and gave up on: `PauseReport("wait", 300.2, aborted=("g1/0/2",), cancelled=(), failed={})`."""

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

"""Pausing every replica, those that join meanwhile included."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from titan_rl.calls.bounded import limited
from titan_rl.generation.router.flight import Flights, NotResumedError
from titan_rl.generation.router.limits import Limits
from titan_rl.generation.router.member import Member
from titan_rl.generation.router.pool import Pool
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
    """The pause state that every member is brought to, and the gate that requests wait at.

    `mode` is what is wanted from the moment of the call; `open` is set again when a resume has reached all.
    """

    def __init__(
        self, pool: Pool, flights: Flights, limits: Limits, quarantine: Callable[[Member, Exception], None]
    ) -> None:
        self.mode: PauseMode | None = None
        self.open = asyncio.Event()
        self.open.set()
        self._pool = pool
        self._flights = flights
        self._limits = limits
        self._quarantine = quarantine
        self._changing = asyncio.Lock()

    async def pause(self, mode: PauseMode) -> PauseReport:
        if self.mode is not None:
            raise RuntimeError(f"the router is paused already, in mode '{self.mode}'; resume it first")
        started = asyncio.get_running_loop().time()
        self.mode = mode  # before any engine is told, so that nothing arrives behind its back
        self.open.clear()
        aborted = list(self._flights) if mode is PauseMode.ABORT else []
        for flight in aborted:
            flight.aborted = True
        async with self._changing:
            if mode is PauseMode.KEEP:
                self._flights.freeze(self._limits.paused_s)
            elif mode is PauseMode.WAIT and not await self._all_idle():
                aborted = [flight for flight in self._flights if flight.member is not None]
            cancelled = await self._flights.end(aborted)
            failed = await self._apply_to_all()
        seconds = asyncio.get_running_loop().time() - started
        return PauseReport(mode, seconds, tuple(flight.request_id for flight in aborted), cancelled, failed)

    async def resume(self) -> None:
        async with self._changing:  # a pause under way ends first
            if self.mode is None:
                raise RuntimeError("the router is not paused; there is nothing to resume")
            self.mode = None
            await self._apply_to_all()
            self._open_gate()

    async def wait_open(self) -> None:
        try:
            async with asyncio.timeout(self._limits.paused_s):
                await self.open.wait()
        except TimeoutError:
            raise self.not_resumed() from None

    def not_resumed(self) -> NotResumedError:
        return NotResumedError(f"the router was not resumed within {self._limits.paused_s:g} s")

    def applied(self, member: Member) -> bool:
        return member.paused == self.mode

    async def apply(self, member: Member) -> None:
        """Bring one member to the wanted pause state.

        Raises:
            OutOfTimeError: it takes longer than `call_s`.
            Exception: whatever the replica fails with.
        """
        async with member.pausing:
            while not self.applied(member):
                wanted, before = self.mode, member.paused
                member.paused = "unknown"
                change = "the resume" if wanted is None else f'the pause in mode "{wanted}"'
                async with limited(self._limits.call_s, change):
                    if before is not None:
                        await member.calls.resume()
                    if wanted is not None:
                        await member.calls.pause(wanted)
                member.paused = wanted

    def _open_gate(self) -> None:
        if self.mode is not None:  # paused again while the replicas were resuming
            return
        self._flights.thaw()
        self.open.set()

    async def _apply_to_all(self) -> dict[str, Exception]:
        """Members out of service are left to their recovery, which ends in the wanted state too."""
        members = [member for member in self._pool if member.serving or member.draining]
        results = await asyncio.gather(*(self.apply(member) for member in members), return_exceptions=True)
        failed: dict[str, Exception] = {}
        for member, result in zip(members, results, strict=True):
            if isinstance(result, Exception):
                failed[member.name] = result
                self._quarantine(member, result)
        return failed

    async def _all_idle(self) -> bool:
        """Wait until no replica runs a request; the closed gate keeps those idle that are."""
        try:
            async with asyncio.timeout(self._limits.finish_s):
                for member in self._pool:
                    await member.idle.wait()
        except TimeoutError:
            return False
        return True

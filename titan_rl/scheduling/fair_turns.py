"""Fair turns of several experiments at one trainer, by the trainer's time: start-time fair queueing.

Each experiment has a virtual time, to which its turns add their seconds. The trainer goes to the waiting experiment
with the smallest virtual time, so experiments that always have a batch ready get equal shares of the trainer's time,
however long their steps are. A turn is never interrupted.

An experiment that ends a step is not waiting at that moment, although its version is about to be published and its next
batch may be ready. If the experiment came back quickly the last time, the trainer is kept free for it for a fraction of
a step (anticipation, as in I/O schedulers; Iyer and Druschel, 2001): for its publication, and for its next step if it
is behind the others. Otherwise short and long steps would alternate, regardless of their lengths.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

HOLD_SHARE = 0.1
"""Longest time for which the trainer is kept free, as a share of the longest turn so far."""


@dataclass(slots=True)
class _Account:
    """Turns of one experiment."""

    virtual_s: float = 0.0
    used_s: float = 0.0
    ended_at: float | None = None  # end of the last turn
    gap_s: float = math.inf  # last interval between the end of a turn and the request of the next step
    urgent_gap_s: float = math.inf  # last interval between the end of a turn and the request of an urgent turn


@dataclass(slots=True, eq=False)
class _Request:
    name: str
    is_urgent: bool
    granted: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class FairTurns:
    """Turns of experiments at a trainer that does one thing at a time.

    Example:

        turns = FairTurns(["sort", "sum"])
        async with turns.turn("sort"):
            await trainer.step(samples)

    Args:
        names: Names of the experiments.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._accounts = {name: _Account() for name in names}
        self._waiting: list[_Request] = []  # in the order of their arrival
        self._running: str | None = None  # experiment of the current turn
        self._num_ended = 0
        self._floor_s = 0.0  # virtual time at which the last turn began
        self._longest_s = 0.0
        self._held_for: str | None = None
        self._hold: asyncio.TimerHandle | None = None

    @asynccontextmanager
    async def turn(self, name: str, *, urgent: bool = False) -> AsyncGenerator[None]:
        """Context in which the trainer belongs to an experiment.

        Args:
            name: Name of the experiment.
            urgent: Whether the turn precedes all turns that are not urgent. It should be short, such as a publication.
        """
        await self._take(name, is_urgent=urgent)
        began = self._now()
        try:
            yield
        finally:
            self._end(name, self._now() - began, is_step=not urgent)

    def progress_ahead_of(self, name: str) -> int | None:
        """Value that changes with every turn that ends while an experiment waits for its turn; None if the experiment
        does not wait."""
        return self._num_ended if any(request.name == name for request in self._waiting) else None

    def waits_for(self, name: str) -> str:
        """Description of an experiment's wait, such as "its turn at the trainer, which is at work for sum"; "" if it
        does not wait."""
        if self.progress_ahead_of(name) is None:
            return ""
        return f"its turn at the trainer, which is {f'at work for {self._running}' if self._running else 'idle'}"

    def used_s(self, name: str) -> float:
        """Seconds of the turns of an experiment so far."""
        return self._accounts[name].used_s

    def share(self, name: str) -> float:
        """Share of an experiment in the seconds of all turns so far; 0 before the first turn."""
        total = sum(account.used_s for account in self._accounts.values())
        return self._accounts[name].used_s / total if total else 0.0

    async def _take(self, name: str, *, is_urgent: bool) -> None:
        account = self._accounts[name]
        since_s = math.inf if account.ended_at is None else self._now() - account.ended_at
        if is_urgent:
            account.urgent_gap_s = since_s
        else:
            account.gap_s = since_s
            # An experiment that had nothing to train keeps the credit of only one turn.
            account.virtual_s = max(account.virtual_s, self._floor_s - self._longest_s)
        request = _Request(name, is_urgent)
        self._waiting.append(request)
        self._grant()
        try:
            await request.granted
        except asyncio.CancelledError:
            if request in self._waiting:
                self._waiting.remove(request)
            elif request.granted.done() and not request.granted.cancelled():
                self._end(name, 0.0, is_step=False)
            raise

    def _end(self, name: str, seconds: float, *, is_step: bool) -> None:
        account = self._accounts[name]
        account.virtual_s += seconds
        account.used_s += seconds
        account.ended_at = self._now()
        self._longest_s = max(self._longest_s, seconds)
        self._running = None
        self._num_ended += 1
        if self._held_for in (None, name):
            self._hold_for(name, is_step=is_step)
        self._grant()

    def _hold_for(self, name: str, *, is_step: bool) -> None:
        """Keep the trainer free for an experiment that is expected to come back soon."""
        self._stop_holding()
        account, limit_s = self._accounts[name], HOLD_SHARE * self._longest_s
        others = [self._accounts[each.name].virtual_s for each in self._waiting if each.name != name]
        publishes = is_step and account.urgent_gap_s <= limit_s
        is_behind = account.virtual_s < min(others, default=0.0)
        if others and (publishes or (is_behind and account.gap_s <= limit_s)):
            self._held_for = name
            self._hold = asyncio.get_running_loop().call_later(limit_s, self._hold_expired)

    def _stop_holding(self) -> None:
        if self._hold is not None:
            self._hold.cancel()
        self._held_for = self._hold = None

    def _hold_expired(self) -> None:
        self._stop_holding()
        self._grant()

    def _grant(self) -> None:
        if self._running is not None or (request := self._next()) is None:
            return
        self._waiting.remove(request)
        self._running = request.name
        if not request.is_urgent:
            self._stop_holding()
            self._floor_s = self._accounts[request.name].virtual_s
        request.granted.set_result(None)

    def _next(self) -> _Request | None:
        waiting = [each for each in self._waiting if not each.granted.done()]  # without cancelled requests
        if urgent := [each for each in waiting if each.is_urgent]:
            return urgent[0]
        if self._held_for is not None:
            waiting = [each for each in waiting if each.name == self._held_for]
        return min(waiting, key=lambda each: self._accounts[each.name].virtual_s, default=None)

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()

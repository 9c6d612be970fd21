"""Requests between call and answer, and how they are ended early."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Coroutine, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from titan_rl.calls import stopwatch
from titan_rl.calls.bounded import BoundedCall
from titan_rl.errors import GenerationError, RequestError
from titan_rl.generation.partial import Partial
from titan_rl.generation.request import EngineRequest
from titan_rl.generation.router.aborts import Aborts
from titan_rl.generation.router.limits import Limits
from titan_rl.generation.router.member import Member
from titan_rl.generation.router.stall import StallWatch

logger = logging.getLogger(__name__)
T = TypeVar("T")


class NotResumedError(GenerationError):
    """A request met a pause that was not resumed within the limit: nobody's failure but the pausing one's."""


class Flight:
    """One request inside the router. Whatever it waits for, it waits in `within`, so that it can be interrupted."""

    def __init__(self, request_id: str, cancel_s: float) -> None:
        self.request_id = request_id
        self.engine_id = request_id  # differs for each attempt, so that an orphan is never a duplicate
        self.member: Member | None = None  # where it runs; None while it waits for a replica
        self.partial: Partial | None = None  # what it has got so far
        self.aborted = False  # its answer is an aborted completion, with the tokens that come back
        self.interrupted = False  # its present wait was cut short by the router, and by nobody's failure
        self.landed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._cancel_s = cancel_s
        self._call: BoundedCall[Any] | None = None  # what it waits for at present
        self.interrupted_s = 0.0  # spent frozen, or waiting for a pause to end
        self._failure: Exception | None = None  # what the present wait was cut short with
        self._remaining_s: float | None = None  # of a frozen limit
        self._frozen_at: float | None = None
        self._freezes: list[tuple[float, float]] = []  # that have ended: from when, until when
        self._num_departures = 0
        self._watch = stopwatch.current()
        self._stopwatch_pause: stopwatch.StopwatchPause | None = None  # of the rollout's time, while frozen

    def depart(self, member: Member) -> None:
        """Bound for `member`, under an engine id of its own from the second time on: "g0/0/0", "g0/0/0~1"."""
        self.member = member
        self.engine_id = f"{self.request_id}~{self._num_departures}" if self._num_departures else self.request_id
        self._num_departures += 1

    async def within(
        self, seconds: float | None, coroutine: Coroutine[Any, Any, T], frozen_s: float | None = None
    ) -> T:
        """The coroutine's result, as a `BoundedCall` gives it.

        Args:
            seconds: None sets no limit.
            frozen_s: the wait begins frozen, for so long at most.

        Raises:
            TimeoutError: `seconds` have passed, not counting frozen ones, or the flight was interrupted.
            NotResumedError: it was frozen for too long.
            Exception: what `fail` was called with.
        """
        self.interrupted, self._failure = False, None
        what = f"request {self.request_id!r}" + ("" if self.member is None else f" on replica {self.member.name}")
        call = self._call = BoundedCall(coroutine, what, cleanup_s=self._cancel_s, error_type=GenerationError)
        try:
            if seconds is not None:
                call.reschedule(asyncio.get_running_loop().time() + seconds)
            if frozen_s is not None:
                self.freeze(frozen_s)
            return await call.result()
        except TimeoutError as error:
            if not call.expired():
                raise
            if self._failure is not None:
                raise self._failure from None
            if self._frozen_at is not None and not self.interrupted:
                raise NotResumedError("frozen by a pause that was not resumed in time") from error
            raise TimeoutError("interrupted" if self.interrupted else f"it took longer than {seconds:g} s") from error
        finally:
            self._call = None
            self._end_freeze()

    def _end_freeze(self) -> None:
        if self._frozen_at is not None:
            now = asyncio.get_running_loop().time()
            self.interrupted_s += now - self._frozen_at
            self._freezes.append((self._frozen_at, now))
        self._remaining_s = self._frozen_at = None
        if self._stopwatch_pause is not None:
            self._stopwatch_pause.end()
            self._stopwatch_pause = None

    def interrupt(self) -> None:
        """End the present wait with `TimeoutError`."""
        if self._is_waiting:
            self.interrupted = True
            self._cut()

    def fail(self, error: Exception) -> None:
        """End the present wait with `error`."""
        if self._is_waiting:
            self._failure = error
            self._cut()

    @property
    def _is_waiting(self) -> bool:
        """In a wait that nobody has cut short yet."""
        call = self._call
        return call is not None and not (call.expired() or self.interrupted or self._failure)

    def _cut(self) -> None:
        assert self._call is not None
        self._call.reschedule(asyncio.get_running_loop().time())

    def freeze(self, limit_s: float) -> None:
        """Stop the clock of the present wait, for `limit_s` at most."""
        if not self._is_waiting:
            return
        assert self._call is not None
        now = asyncio.get_running_loop().time()
        if self._frozen_at is None:
            self._frozen_at = now
            self._remaining_s = None if (when := self._call.when()) is None else when - now
            self._stopwatch_pause = None if self._watch is None else self._watch.pause()
        self._call.reschedule(now + limit_s)

    def thaw(self) -> None:
        """Let the clock run on, with what was left."""
        if not self._is_waiting or self._frozen_at is None:
            return
        assert self._call is not None
        now, remaining_s = asyncio.get_running_loop().time(), self._remaining_s
        self._end_freeze()
        self._call.reschedule(None if remaining_s is None else now + remaining_s)

    def frozen_s(self, begin: float, end: float) -> float:
        """Seconds between two times of the event loop that lie in freezes that have ended."""
        return sum(max(0.0, min(end, until) - max(begin, since)) for since, until in self._freezes)


class Flights:
    """Every request in the router by id."""

    def __init__(self, limits: Limits, aborts: Aborts, stalls: StallWatch) -> None:
        self._limits = limits
        self._aborts = aborts
        self._stalls = stalls
        self._flights: dict[str, Flight] = {}
        self._waits: set[Flight] = set()  # for flights to land, frozen with them
        self._frozen_s: float | None = None  # how long a freeze may last, while there is one

    def freeze(self, limit_s: float) -> None:
        """Stop the clocks of all flights, of those that wait for some to land, and of the replicas' signs of life."""
        self._frozen_s = limit_s
        self._stalls.freeze()
        for flight in (*self, *self._waits):
            flight.freeze(limit_s)

    def thaw(self) -> None:
        self._frozen_s = None
        self._stalls.thaw()
        for flight in (*self, *self._waits):
            flight.thaw()

    async def wait(self, seconds: float, landing: Coroutine[Any, Any, T]) -> T:
        """The result of something that waits for flights to land.

        Raises:
            TimeoutError: `seconds` have passed, not counting those in which the flights were frozen.
            NotResumedError: they were frozen for too long.
        """
        wait = Flight("until others land", self._limits.cancel_s)
        self._waits.add(wait)
        try:
            return await wait.within(seconds, landing, self._frozen_s)
        finally:
            self._waits.discard(wait)

    def __iter__(self) -> Iterator[Flight]:
        return iter(tuple(self._flights.values()))

    @contextmanager
    def track(self, request: EngineRequest) -> Generator[Flight]:
        """A flight that is known until the block is left.

        Raises:
            RequestError: a request of that id is in flight.
        """
        request_id = request.request_id
        if request_id in self._flights:
            raise RequestError(f"request id {request_id!r} is in flight already; request ids must be unique")
        flight = self._flights[request_id] = Flight(request_id, self._limits.cancel_s)
        flight.partial = Partial(request)
        try:
            yield flight
        finally:
            del self._flights[request_id]
            flight.landed.set_result(None)

    def find(self, request_ids: Iterable[str]) -> list[Flight]:
        """The flights of these ids; unknown ones are left out."""
        return [self._flights[request_id] for request_id in request_ids if request_id in self._flights]

    def on(self, member: Member) -> list[Flight]:
        return [flight for flight in self if flight.member is member]

    async def end(self, flights: Sequence[Flight]) -> tuple[str, ...]:
        """Abort these flights and wait until they have landed.

        The abort is repeated at an interval, because a request may reach its engine after an earlier one. Flights
        still out after `abort_s` are cancelled, and after another `cancel_s` let go.

        Returns:
            Ids of the flights that had to be cancelled.
        """
        for flight in flights:
            flight.aborted = True
            if flight.member is None:
                flight.interrupt()
        try:
            async with asyncio.timeout(self._limits.abort_s):
                while running := [flight for flight in flights if not flight.landed.done()]:
                    await asyncio.gather(
                        *(self._aborts.tell(member, ids) for member, ids in _by_member(running).items())
                    )
                    await asyncio.wait([f.landed for f in running], timeout=self._limits.reabort_interval_s)
                return ()
        except TimeoutError:
            if not (running := [flight for flight in flights if not flight.landed.done()]):
                return ()
        for flight in running:
            flight.interrupt()
        await asyncio.wait([flight.landed for flight in running], timeout=self._limits.cancel_s)
        given_up = tuple(flight.request_id for flight in running)
        logger.warning("%d aborted requests did not return and were cancelled: %s", len(given_up), given_up[:16])
        return given_up


def _by_member(flights: Iterable[Flight]) -> dict[Member, list[str]]:
    """Engine ids of the flights that run somewhere."""
    ids: defaultdict[Member, list[str]] = defaultdict(list)
    for flight in flights:
        if flight.member is not None:
            ids[flight.member].append(flight.engine_id)
    return ids

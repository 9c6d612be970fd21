"""Requests in flight in a router, and how they are aborted."""

from __future__ import annotations

import asyncio
import logging
import re
from collections import Counter, defaultdict
from collections.abc import Coroutine, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from titan_rl.core.calls import stopwatch
from titan_rl.core.calls.bounded import BoundedCall, limited
from titan_rl.core.errors import GenerationError, RequestError
from titan_rl.generation.request import EngineRequest, Partial
from titan_rl.generation.router.health import BackgroundTasks, StallWatch
from titan_rl.generation.router.pool import PooledReplica, Reservation
from titan_rl.generation.router.replica import Limits

T = TypeVar("T")


class NotResumedError(GenerationError):
    """A request met a pause that was not resumed within the limit: nobody's failure but the pausing one's."""


class Waiter:
    """Waits for one thing at a time, in `within`.

    Args:
        what: names it in messages.
        cancel_s: what is waited for has so long to end when it is cancelled.
    """

    def __init__(self, what: str, cancel_s: float) -> None:
        self.what = what
        self.was_cut_short = False  # the present wait was cut short by the router, and by nobody's failure
        self.interrupted_s = 0.0  # spent frozen, or waiting for a pause to end
        self._cancel_s = cancel_s
        self._call: BoundedCall[Any] | None = None  # what is waited for at present
        self._failure: Exception | None = None  # what the present wait was cut short with
        self._remaining_s: float | None = None  # of a frozen limit
        self._frozen_at: float | None = None
        self._freezes: list[tuple[float, float]] = []  # that have ended: from when, until when
        self._watch = stopwatch.current()
        self._stopwatch_pause: stopwatch.StopwatchPause | None = None  # of the rollout's time, while frozen

    async def within(
        self, seconds: float | None, coroutine: Coroutine[Any, Any, T], frozen_s: float | None = None
    ) -> T:
        """The coroutine's result, as a `BoundedCall` gives it.

        Args:
            seconds: None sets no limit.
            frozen_s: the wait begins frozen, for so long at most.

        Raises:
            TimeoutError: `seconds` have passed, not counting frozen ones, or `cut_short` was called.
            NotResumedError: it was frozen for too long.
            Exception: what `fail` was called with.
        """
        self.was_cut_short, self._failure = False, None
        call = self._call = BoundedCall(coroutine, self.what, cleanup_s=self._cancel_s, error_type=GenerationError)
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
            if self._frozen_at is not None and not self.was_cut_short:
                raise NotResumedError("frozen by a pause that was not resumed in time") from error
            raise TimeoutError("cut short" if self.was_cut_short else f"it took longer than {seconds:g} s") from error
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

    def cut_short(self) -> None:
        """End the present wait with `TimeoutError`."""
        if self._is_waiting:
            self.was_cut_short = True
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
        return call is not None and not (call.expired() or self.was_cut_short or self._failure)

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


logger = logging.getLogger(__name__)


class Aborts:
    """Sends aborts to replicas. A failed abort does not quarantine the replica; it is logged once, until an abort
    succeeds again."""

    def __init__(self, tasks: BackgroundTasks, call_s: float) -> None:
        self._tasks = tasks
        self._call_s = call_s
        self._orphans: dict[PooledReplica, list[str]] = {}  # of this turn of the event loop
        self._untaken: dict[PooledReplica, list[str]] = {}  # of aborts that failed
        self._unheard = Counter[str]()  # all orphans whose replica may not know of it yet

    async def send(self, replica: PooledReplica, engine_ids: Sequence[str]) -> bool:
        """Ask a replica to end requests, and return whether it has heard that, in time."""
        try:
            async with limited(self._call_s, "the abort"):
                await replica.calls.abort(engine_ids)
        except Exception as error:
            if replica.takes_aborts:
                count = len(engine_ids)
                logger.warning("replica %s did not take an abort of %d requests: %r", replica.name, count, error)
            replica.takes_aborts = False
            return False
        replica.takes_aborts = True
        return True

    def send_soon(self, replica: PooledReplica, engine_id: str) -> None:
        """Abort a request whose caller is gone, because its engine may still run it. Requests of one turn of the event
        loop share one call: losing a replica orphans many at once."""
        if not self._orphans:
            asyncio.get_running_loop().call_soon(self._send_orphans)
        self._orphans.setdefault(replica, []).append(engine_id)
        self._unheard[engine_id] += 1

    def may_run(self, engine_id: str) -> bool:
        """Whether an engine may still run an orphaned request with this id, so that it must not be used again."""
        return engine_id in self._unheard

    def send_again(self, replica: PooledReplica) -> None:
        """Repeat the aborts that the replica did not take."""
        self._start(replica, ())

    def forget(self, replica: PooledReplica) -> None:
        """Drop the aborts of a removed replica."""
        self._heard(self._untaken.pop(replica, ()))

    def _send_orphans(self) -> None:
        orphans, self._orphans = self._orphans, {}
        for replica, engine_ids in orphans.items():
            self._start(replica, engine_ids)

    def _start(self, replica: PooledReplica, engine_ids: Sequence[str]) -> None:
        if engine_ids := [*self._untaken.pop(replica, ()), *engine_ids]:
            self._tasks.start(self._end_orphans(replica, engine_ids), f"abort {len(engine_ids)} on {replica.name}")

    async def _end_orphans(self, replica: PooledReplica, engine_ids: Sequence[str]) -> None:
        if await self.send(replica, engine_ids) or replica.removed:
            self._heard(engine_ids)
        else:  # the engine may be at them still
            self._untaken.setdefault(replica, []).extend(engine_ids)

    def _heard(self, engine_ids: Sequence[str]) -> None:
        """No engine is at these any more."""
        for engine_id in engine_ids:
            self._unheard[engine_id] -= 1
            if not self._unheard[engine_id]:
                del self._unheard[engine_id]


_LATER_ATTEMPT = re.compile(r"~\d+\Z")


class RequestInFlight(Waiter):
    """One request inside the router. Whatever it waits for, it waits in `within`."""

    def __init__(self, request: EngineRequest, aborts: Aborts, placed: Placed, cancel_s: float) -> None:
        super().__init__(f"request {request.request_id!r}", cancel_s)
        self.request_id = request.request_id
        self.engine_id = request.request_id  # differs for each attempt, so that an orphan is never a duplicate
        self.partial = Partial(request)  # what it has got so far
        self.replica: PooledReplica | None = None  # where it runs; None while it waits for a replica
        self.aborted = False  # its answer is an aborted completion, with the tokens that come back
        self.is_leaving = False  # its attempt is being ended, so that it goes on elsewhere
        self.place: Reservation | None = None  # where it goes on then
        self.was_moved = False  # the present attempt is one that it did not ask for
        self.moved_with: int | None = None  # tokens that it had when it was last told to move
        self.failed_on = set[PooledReplica]()
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._aborts = aborts
        self._placed = placed
        self._num_attempts = 0

    def assign(self, replica: PooledReplica) -> EngineRequest:
        """Begin an attempt, on `replica`. Returns what to ask it for, under an engine id of its own: "g0/0/0", and
        "g0/0/0~1" from the second attempt on, or where an engine may be at an earlier request of that id still. A
        request id that ends like the latter has the suffix from its first attempt on, so that no two requests ever
        have the same engine id."""
        self.replica = replica
        self.was_moved, self.is_leaving = self.is_leaving, False
        self._placed[replica][self] = None
        self.what = f"request {self.request_id!r} on replica {replica.name}"
        while True:
            is_plain = not self._num_attempts and _LATER_ATTEMPT.search(self.request_id) is None
            self.engine_id = self.request_id if is_plain else f"{self.request_id}~{self._num_attempts}"
            self._num_attempts += 1
            if not self._aborts.may_run(self.engine_id):
                break
        return replace(self.partial.rest, request_id=self.engine_id)

    def unassign(self) -> None:
        """The attempt is over."""
        if (replica := self.replica) is not None:
            del self._placed[replica][self]
            if not self._placed[replica]:
                del self._placed[replica]
        self.replica = None
        self.what = f"request {self.request_id!r}"

    def leave(self, place: Reservation) -> None:
        """It is told to end its attempt and go on at `place`."""
        self.is_leaving, self.place, self.moved_with = True, place, self.partial.num_tokens

    def give_place_back(self) -> None:
        if self.place is not None:
            self.place.give_back()
            self.place = None


Placed = defaultdict[PooledReplica, dict[RequestInFlight, None]]
"""Requests by where they run: what a replica's death costs is then that of its own requests."""


class RequestsInFlight:
    """Every request in the router by id."""

    def __init__(self, limits: Limits, aborts: Aborts, stalls: StallWatch) -> None:
        self._limits = limits
        self._aborts = aborts
        self._stalls = stalls
        self._requests: dict[str, RequestInFlight] = {}
        self._placed: Placed = defaultdict(dict)
        self._waits: set[Waiter] = set()  # for requests to end, frozen with them
        self._frozen_s: float | None = None  # how long a freeze may last, while there is one

    def freeze(self, limit_s: float) -> None:
        """Stop the clocks of all requests, of those that wait for some to end, and of the replicas' signs of life."""
        self._frozen_s = limit_s
        self._stalls.freeze()
        for waiter in (*self, *self._waits):
            waiter.freeze(limit_s)

    def thaw(self) -> None:
        self._frozen_s = None
        self._stalls.thaw()
        for waiter in (*self, *self._waits):
            waiter.thaw()

    async def wait(self, seconds: float, end: Coroutine[Any, Any, T]) -> T:
        """The result of something that waits for requests to end.

        Raises:
            TimeoutError: `seconds` have passed, not counting those in which the requests were frozen.
            NotResumedError: they were frozen for too long.
        """
        wait = Waiter("the wait for requests to end", self._limits.cancel_s)
        self._waits.add(wait)
        try:
            return await wait.within(seconds, end, self._frozen_s)
        finally:
            self._waits.discard(wait)

    def __iter__(self) -> Iterator[RequestInFlight]:
        return iter(tuple(self._requests.values()))

    @contextmanager
    def track(self, request: EngineRequest) -> Generator[RequestInFlight]:
        """A request is in flight until the block is left.

        Raises:
            RequestError: a request of that id is in flight.
        """
        request_id = request.request_id
        if request_id in self._requests:
            raise RequestError(f"request id {request_id!r} is in flight already; request ids must be unique")
        in_flight = self._requests[request_id] = RequestInFlight(
            request, self._aborts, self._placed, self._limits.cancel_s
        )
        try:
            yield in_flight
        finally:
            in_flight.give_place_back()
            del self._requests[request_id]
            in_flight.done.set_result(None)

    def find(self, request_ids: Iterable[str]) -> list[RequestInFlight]:
        """The requests with these ids; unknown ids are ignored."""
        return [self._requests[request_id] for request_id in request_ids if request_id in self._requests]

    def on(self, replica: PooledReplica) -> list[RequestInFlight]:
        """The requests that run on a replica, in the order in which they were sent."""
        return list(self._placed.get(replica, ()))

    async def abort(self, requests: Sequence[RequestInFlight]) -> tuple[str, ...]:
        """Abort these and wait until they have ended.

        The abort is repeated at an interval, because a request may reach its engine after an earlier one. Those
        in flight after `abort_s` are cancelled, and after another `cancel_s` let go.

        Returns:
            Ids of those that had to be cancelled.
        """
        for request in requests:
            request.aborted = True
            if request.replica is None:
                request.cut_short()
        try:
            async with asyncio.timeout(self._limits.abort_s):
                while running := [request for request in requests if not request.done.done()]:
                    await asyncio.gather(
                        *(self._aborts.send(replica, ids) for replica, ids in _by_replica(running).items())
                    )
                    await asyncio.wait([request.done for request in running], timeout=self._limits.reabort_interval_s)
                return ()
        except TimeoutError:
            if not (running := [request for request in requests if not request.done.done()]):
                return ()
        for request in running:
            request.cut_short()
        await asyncio.wait([request.done for request in running], timeout=self._limits.cancel_s)
        given_up = tuple(request.request_id for request in running)
        logger.warning("%d aborted requests did not return and were cancelled: %s", len(given_up), given_up[:16])
        return given_up


def _by_replica(requests: Iterable[RequestInFlight]) -> dict[PooledReplica, list[str]]:
    """Engine ids of the requests that run somewhere."""
    ids: defaultdict[PooledReplica, list[str]] = defaultdict(list)
    for request in requests:
        if request.replica is not None:
            ids[request.replica].append(request.engine_id)
    return ids

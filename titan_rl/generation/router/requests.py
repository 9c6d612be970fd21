"""Requests in flight in a router: their waits, their replicas with a watchdog, and aborts."""

from __future__ import annotations

import asyncio
import logging
import re
from collections import defaultdict
from collections.abc import Coroutine, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from titan_rl.core.calls import stopwatch
from titan_rl.core.calls.bounded import BoundedCall
from titan_rl.core.errors import EngineStalledError, GenerationError, RequestError
from titan_rl.generation.request import EngineRequest, OnChunk, Partial
from titan_rl.generation.router.pool import Pool, PooledReplica, Reservation
from titan_rl.types import Completion

T = TypeVar("T")


class NotResumedError(GenerationError):
    """A pause was not resumed within the limit. Neither the request nor its replica is at fault."""


class CutShortError(Exception):
    """The router ended a wait. Neither the request nor its replica is at fault."""


class Waiter:
    """Time-limited waits of one request, one at a time, in `within`. They can be frozen.

    Args:
        what: Name of the request in messages.
        cancel_s: Time for a cancelled call to end.
    """

    def __init__(self, what: str, cancel_s: float) -> None:
        self.what = what
        self.interrupted_s = 0.0  # seconds spent frozen, or waiting for a pause to end
        self._cancel_s = cancel_s
        self._call: BoundedCall[Any] | None = None  # the present wait
        self._ended_by: Exception | None = None  # argument of `end`
        self._remaining_s: float | None = None  # time left of a frozen limit
        self._frozen_at: float | None = None
        self._freezes: list[tuple[float, float]] = []  # start and end of past freezes
        self._watch = stopwatch.current()
        self._stopwatch_pause: stopwatch.StopwatchPause | None = None  # stops the rollout's time while frozen

    async def within(
        self, seconds: float | None, coroutine: Coroutine[Any, Any, T], frozen_s: float | None = None
    ) -> T:
        """Await a coroutine and return its result; see `BoundedCall`.

        Args:
            seconds: Time limit, not counting frozen time. None sets no limit.
            frozen_s: If given, the wait begins frozen, for at most this many seconds.

        Raises:
            TimeoutError: `seconds` have passed.
            NotResumedError: the wait was frozen for too long.
            Exception: the error passed to `end`.
        """
        self._ended_by = None
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
            if self._ended_by is not None:
                raise self._ended_by from None
            if self._frozen_at is not None:
                raise NotResumedError("frozen by a pause that was not resumed in time") from error
            raise TimeoutError(f"it took longer than {seconds:g} s") from error
        finally:
            self._call = None
            self._end_freeze()

    def end(self, error: Exception) -> None:
        """End the present wait with `error`. Does nothing if there is no wait, or it has been ended already."""
        if (call := self._open_call()) is not None:
            self._ended_by = error
            call.reschedule(asyncio.get_running_loop().time())

    def freeze(self, limit_s: float) -> None:
        """Stop the clock of the present wait, for at most `limit_s` seconds."""
        if (call := self._open_call()) is None:
            return
        now = asyncio.get_running_loop().time()
        if self._frozen_at is None:
            self._frozen_at = now
            self._remaining_s = None if (when := call.when()) is None else when - now
            self._stopwatch_pause = None if self._watch is None else self._watch.pause()
        call.reschedule(now + limit_s)

    def thaw(self) -> None:
        """Restart the clock with the time that was left."""
        if self._frozen_at is None or (call := self._open_call()) is None:
            return
        now, remaining_s = asyncio.get_running_loop().time(), self._remaining_s
        self._end_freeze()
        call.reschedule(None if remaining_s is None else now + remaining_s)

    def frozen_s(self, begin: float, end: float) -> float:
        """Frozen seconds between two times of the event loop's clock, counting only freezes that are over."""
        return sum(max(0.0, min(end, until) - max(begin, since)) for since, until in self._freezes)

    def _open_call(self) -> BoundedCall[Any] | None:
        """The present wait, unless it is ending already."""
        call = self._call
        return None if call is None or call.expired() or self._ended_by is not None else call

    def _end_freeze(self) -> None:
        if self._frozen_at is not None:
            now = asyncio.get_running_loop().time()
            self.interrupted_s += now - self._frozen_at
            self._freezes.append((self._frozen_at, now))
        self._remaining_s = self._frozen_at = None
        if self._stopwatch_pause is not None:
            self._stopwatch_pause.end()
            self._stopwatch_pause = None


logger = logging.getLogger(__name__)

_LATER_ATTEMPT = re.compile(r"~\d+\Z")


class RequestInFlight(Waiter):
    """One request inside the router, and its present attempt. All waits of the request use `within`."""

    def __init__(self, request: EngineRequest, on_chunk: OnChunk | None, requests: RequestsInFlight) -> None:
        super().__init__(f"request {request.request_id!r}", requests.pool.limits.cancel_s)
        self.request_id = request.request_id
        self.engine_id = request.request_id  # differs for each attempt, so that an orphan is never a duplicate
        self.partial = Partial(request, on_chunk)
        self.replica: PooledReplica | None = None  # runs the present attempt; None while it waits for a replica
        self.aborted = False  # whether its answer is an aborted completion, with the tokens that come back
        self.is_leaving = False  # whether its replica is ending the attempt, which continues on another
        self.reservation: Reservation | None = None  # where it continues then
        self.moved_with: int | None = None  # number of tokens when its last move began
        self.failed_on = set[PooledReplica]()
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._requests = requests
        self._num_attempts = 0

    def assign(self, replica: PooledReplica) -> EngineRequest:
        """Begin an attempt on `replica`. Returns the request to send, with a separate engine id for each attempt:
        "g0/0/0", then "g0/0/0~1" from the second attempt on, or if an engine may still run an earlier request of that
        id. A request id that itself ends in such a suffix gets one from its first attempt on, so engine ids are unique.
        """
        self.replica, self.is_leaving = replica, False
        self._requests.stalls.begin(replica, self)
        self.what = f"request {self.request_id!r} on replica {replica.name}"
        while True:
            is_plain = not self._num_attempts and _LATER_ATTEMPT.search(self.request_id) is None
            plain_id = f"{self.request_id}{self._requests.pool.origin}"
            self.engine_id = plain_id if is_plain else f"{plain_id}~{self._num_attempts}"
            self._num_attempts += 1
            if not self._requests.pool.aborts.may_run(self.engine_id):
                break
        rest = self.partial.rest
        return rest if rest.request_id == self.engine_id else replace(rest, request_id=self.engine_id)

    def unassign(self) -> None:
        """End the attempt."""
        if self.replica is not None:
            self._requests.stalls.end(self.replica, self)
        self.replica = None
        self.what = f"request {self.request_id!r}"

    def orphan(self) -> None:
        """Make the engine forget the present attempt, because its answer will not be awaited."""
        assert self.replica is not None
        self._requests.pool.aborts.send_soon(self.replica, self.engine_id)

    def abort_soon(self) -> None:
        """Abort the request in the background."""
        self._requests.pool.tasks.start(self._requests.abort([self]), f"end {self.request_id}")

    def leave(self, reservation: Reservation) -> None:
        """Plan to continue on the replica of `reservation`, once the attempt has ended."""
        self.is_leaving, self.reservation, self.moved_with = True, reservation, self.partial.num_tokens

    def release_reservation(self) -> None:
        if self.reservation is not None:
            self.reservation.give_back()
            self.reservation = None

    def without_freezes(self, completion: Completion, began: float) -> Completion:
        """The answer of an attempt that began at `began`, with the frozen time deducted from `queue_s`. Engines count
        their pauses in `queue_s`, but the frozen time is already in `interrupted_s`."""
        queue_s = completion.metrics.get("queue_s", 0.0)
        frozen_s = self.frozen_s(began, began + queue_s)
        if not frozen_s:
            return completion
        return replace(completion, metrics={**completion.metrics, "queue_s": queue_s - frozen_s})


_ROUNDING_S = 1e-6  # timers may come this much early


class StallWatch:
    """Requests by the replica that runs them, and a watchdog for replicas that give no sign of life for `limit_s`.

    Signs of life are tokens, answers, pulls, and the empty chunks of an engine that steps. A sign for any request of
    the replica counts: a request that queues behind others may wait as long as they progress. If several routers share
    a replica, the pulls of the other routers are signs of life, too (`GeneratorRouter.note_pull_elsewhere`), because
    the engine does not step during a pull. Frozen time does not count. A stalled replica is quarantined, and its
    requests continue on other replicas.

    Recording a sign costs one assignment: each replica with requests has one timer, which checks the time of the last
    sign. It checks twice before it reports a stall, because after a block of the event loop timers run before the signs
    that arrived during the block.
    """

    def __init__(self, limit_s: float, pool: Pool) -> None:
        if not limit_s > 0:
            raise ValueError(f"stall_timeout_s is {limit_s!r}; it must be above 0")
        self._limit_s = limit_s
        self._pool = pool
        self._grace_s = min(1.0, limit_s / 4)  # time between the two checks; a check that is later is repeated
        self._running: dict[PooledReplica, dict[RequestInFlight, None]] = {}
        self._timers: dict[PooledReplica, asyncio.TimerHandle] = {}
        self._frozen_at: float | None = None

    def begin(self, replica: PooledReplica, request: RequestInFlight) -> None:
        """Note that `replica` runs `request` from now on."""
        if replica not in self._running:
            self._running[replica] = {}
            replica.note_alive()
            self._watch(replica)
        self._running[replica][request] = None

    def end(self, replica: PooledReplica, request: RequestInFlight) -> None:
        """Note that `replica` no longer runs `request`."""
        running = self._running[replica]
        del running[request]
        if not running:
            del self._running[replica]
            self._stop(replica)

    def running(self, replica: PooledReplica) -> list[RequestInFlight]:
        """Requests that run on a replica, in the order in which they were sent."""
        return list(self._running.get(replica, ()))

    @property
    def last_seen_at(self) -> float | None:
        """Time of the last sign of life of any replica that runs requests; None if no replica does."""
        return max((replica.last_seen_at for replica in self._running), default=None)

    def freeze(self) -> None:
        """Stop the clocks."""
        if self._frozen_at is None:
            self._frozen_at = asyncio.get_running_loop().time()
            for replica in self._running:
                self._stop(replica)

    def thaw(self) -> None:
        """Restart the clocks with the time that was left."""
        if (frozen_at := self._frozen_at) is not None:
            self._frozen_at = None
            now = asyncio.get_running_loop().time()
            for replica in self._running:
                replica.last_seen_at = now - max(0.0, frozen_at - replica.last_seen_at)
                self._watch(replica)

    def _watch(self, replica: PooledReplica) -> None:
        """Check when a sign is almost overdue, or at the deadline if that is near."""
        if self._frozen_at is None:
            deadline = replica.last_seen_at + self._limit_s
            first = deadline - self._grace_s
            is_close = first < asyncio.get_running_loop().time()
            self._look_at(replica, deadline if is_close else first, again=is_close)

    def _look_at(self, replica: PooledReplica, when: float, *, again: bool) -> None:
        self._timers[replica] = asyncio.get_running_loop().call_at(when, self._look, replica, when, again)

    def _look(self, replica: PooledReplica, due: float, again: bool) -> None:
        now = asyncio.get_running_loop().time()
        deadline = replica.last_seen_at + self._limit_s
        if now < deadline - self._grace_s - _ROUNDING_S:
            self._watch(replica)
        elif not again or now < deadline - _ROUNDING_S or now > due + self._grace_s:
            self._look_at(replica, max(deadline, now + self._grace_s), again=True)
        else:
            self._stalled(replica)
            replica.note_alive()  # so that the same stall is not reported twice while its requests leave
            self._watch(replica)

    def _stalled(self, replica: PooledReplica) -> None:
        error = EngineStalledError(f"no sign of life from {replica.name} for {self._limit_s:g} s")
        self._pool.quarantine(replica, error)
        for request in self.running(replica):
            request.end(error)

    def _stop(self, replica: PooledReplica) -> None:
        if (timer := self._timers.pop(replica, None)) is not None:
            timer.cancel()


class RequestsInFlight:
    """All requests in the router, by id."""

    def __init__(self, pool: Pool, stall_timeout_s: float) -> None:
        self.pool = pool
        self.stalls = StallWatch(stall_timeout_s, pool)
        self.num_answered = 0  # requests that ended without an error
        self._requests: dict[str, RequestInFlight] = {}
        self._most = 0  # largest number of requests at once since `take_most`
        self._waits: set[Waiter] = set()  # waits for requests to end, which are frozen with the requests
        self._frozen_s: float | None = None  # limit of the present freeze

    def __iter__(self) -> Iterator[RequestInFlight]:
        return iter(tuple(self._requests.values()))

    def __len__(self) -> int:
        return len(self._requests)

    def take_most(self) -> int:
        """The largest number of requests at once since this was last called."""
        most, self._most = self._most, len(self)
        return most

    @contextmanager
    def track(self, request: EngineRequest, on_chunk: OnChunk | None) -> Generator[RequestInFlight]:
        """Register a request for the length of the block.

        Raises:
            RequestError: a request of that id is in flight.
        """
        request_id = request.request_id
        if request_id in self._requests:
            raise RequestError(f"request id {request_id!r} is in flight already; request ids must be unique")
        in_flight = self._requests[request_id] = RequestInFlight(request, on_chunk, self)
        self._most = max(self._most, len(self))
        try:
            yield in_flight
            self.num_answered += 1
        finally:
            in_flight.release_reservation()
            del self._requests[request_id]
            in_flight.done.set_result(None)

    def find(self, request_ids: Iterable[str]) -> list[RequestInFlight]:
        """The requests with these ids; unknown ids are ignored."""
        return [self._requests[request_id] for request_id in request_ids if request_id in self._requests]

    def on(self, replica: PooledReplica) -> list[RequestInFlight]:
        """Requests that run on a replica, in the order in which they were sent."""
        return self.stalls.running(replica)

    def freeze(self, limit_s: float) -> None:
        """Stop the clocks of all requests, of waits for requests to end, and of the watchdog."""
        self._frozen_s = limit_s
        self.stalls.freeze()
        for waiter in (*self, *self._waits):
            waiter.freeze(limit_s)

    def thaw(self) -> None:
        self._frozen_s = None
        self.stalls.thaw()
        for waiter in (*self, *self._waits):
            waiter.thaw()

    async def wait_idle(self, replica: PooledReplica, seconds: float) -> None:
        """Wait until a replica runs no request.

        Raises:
            TimeoutError: `seconds` have passed, not counting time in which the requests were frozen.
            NotResumedError: the requests were frozen for too long.
        """
        wait = Waiter("the wait for requests to end", self.pool.limits.cancel_s)
        self._waits.add(wait)
        try:
            await wait.within(seconds, replica.idle.wait(), self._frozen_s)
        finally:
            self._waits.discard(wait)

    async def drain(self, replica: PooledReplica, seconds: float) -> tuple[str, ...]:
        """Wait until a replica runs no request, and abort those that are left when `seconds` have passed.

        Returns:
            Ids of the requests that were aborted.

        Raises:
            NotResumedError: the requests were frozen for too long.
        """
        try:
            await self.wait_idle(replica, seconds)
        except TimeoutError:
            late = self.on(replica)
            logger.warning("replica %s did not drain; aborting %d requests", replica.name, len(late))
            await self.abort(late)
            return tuple(request.request_id for request in late)
        return ()

    async def abort(self, requests: Sequence[RequestInFlight]) -> tuple[str, ...]:
        """Abort requests and wait until they have ended.

        The abort is repeated at an interval, because a request may reach its engine after the first abort. Requests
        still in flight after `abort_s` are cancelled, and abandoned after another `cancel_s`.

        Returns:
            Ids of requests that had to be cancelled.
        """
        limits = self.pool.limits
        for request in requests:
            request.aborted = True
            if request.replica is None:
                request.end(CutShortError())
        try:
            async with asyncio.timeout(limits.abort_s):
                while running := [request for request in requests if not request.done.done()]:
                    sends = [self.pool.aborts.send(replica, ids) for replica, ids in _by_replica(running).items()]
                    await asyncio.gather(*sends)
                    await asyncio.wait([request.done for request in running], timeout=limits.reabort_interval_s)
                return ()
        except TimeoutError:
            if not (running := [request for request in requests if not request.done.done()]):
                return ()
        for request in running:
            request.end(CutShortError())
        await asyncio.wait([request.done for request in running], timeout=limits.cancel_s)
        cancelled = tuple(request.request_id for request in running)
        logger.warning("%d aborted requests did not return and were cancelled: %s", len(cancelled), cancelled[:16])
        return cancelled


def _by_replica(requests: Iterable[RequestInFlight]) -> dict[PooledReplica, list[str]]:
    """Engine ids of running requests, by replica."""
    ids: defaultdict[PooledReplica, list[str]] = defaultdict(list)
    for request in requests:
        if request.replica is not None:
            ids[request.replica].append(request.engine_id)
    return ids

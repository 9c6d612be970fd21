"""Requests between call and completion, and how they are ended early."""

from __future__ import annotations

import asyncio
import logging
import re
from collections import defaultdict
from collections.abc import Coroutine, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from titan_rl.core.errors import RequestError
from titan_rl.generation.partial import Partial
from titan_rl.generation.request import EngineRequest
from titan_rl.generation.router.aborts import Aborts
from titan_rl.generation.router.limits import Limits
from titan_rl.generation.router.pool import PooledReplica, Reservation
from titan_rl.generation.router.stall import StallWatch
from titan_rl.generation.router.waiter import Waiter

logger = logging.getLogger(__name__)
T = TypeVar("T")

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
        """Those of these ids; unknown ones are left out."""
        return [self._requests[request_id] for request_id in request_ids if request_id in self._requests]

    def on(self, replica: PooledReplica) -> list[RequestInFlight]:
        """Those that run there, in the order in which they were sent."""
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

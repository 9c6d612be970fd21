"""Running requests leave full replicas for emptier ones, with their tokens."""

from __future__ import annotations

import asyncio
import heapq
from collections import defaultdict
from collections.abc import Iterator, Sequence

from titan_rl.generation.router.aborts import Aborts
from titan_rl.generation.router.background_tasks import BackgroundTasks
from titan_rl.generation.router.in_flight import RequestInFlight, RequestsInFlight
from titan_rl.generation.router.limits import Limits
from titan_rl.generation.router.pause import Pause
from titan_rl.generation.router.pool import Pool, PooledReplica, Reservation
from titan_rl.generation.types import PauseMode
from titan_rl.types import Completion, FinishReason, SamplingParams

LOOK_S = 1.0
"""From what may call for moves to the look at what each replica has."""

Planned = tuple[PooledReplica, RequestInFlight, PooledReplica]  # from where, what, and to where


class Moves:
    """Evens out how many requests the replicas have, which a strategy cannot: it places each of them once.

    A replica that has at most `below` of the requests of the fullest that has some to give gets some of these, up to
    the mean. They are told to end as for an abort, so that each comes back with all of its tokens, and goes on in the
    other place, which is kept for it from then on: none is lost, or generated again, and whoever waits for that replica
    to be idle, as a drain or a pause, waits for them as well.

    What may move: those that came last first, which may wait in an engine still, and have the fewest tokens to be
    computed anew. One moves again when its tokens have more than doubled, so that of an answer no more is computed anew
    than twice its tokens, and as many prompts as it has doublings. One with a seed stays: behind a seam it draws
    another answer. So does one whose penalties count its own tokens.

    Where to: to a replica of the same version, so that no answer goes back to an older one, and which has answered
    since it last failed. Not to one that failed this request. Where it fails nevertheless that is no attempt of the
    request's.

    When to look: `LOOK_S` after an answer, a replica's coming into service and a resume; and again while the one thing
    missing is that tokens double, or that a pull ends.

    A look costs a pass over the replicas, one over the requests of those that give, and a logarithm of the replicas'
    number for each request that moves.

    Args:
        below: above 0 and less than 1, or None, which moves none.

    Raises:
        ValueError: `below` is anything else.
    """

    def __init__(
        self,
        pool: Pool,
        requests: RequestsInFlight,
        pause: Pause,
        aborts: Aborts,
        tasks: BackgroundTasks,
        limits: Limits,
        below: float | None,
    ) -> None:
        if below is not None and not 0 < below < 1:
            raise ValueError(f"move_below is {below!r}; it must be above 0 and less than 1, or None")
        self.num_moved = None if below is None else 0  # requests that came back to go on elsewhere, so far
        self._pool = pool
        self._requests = requests
        self._pause = pause
        self._aborts = aborts
        self._tasks = tasks
        self._limits = limits
        self._below = below
        self._timer: asyncio.TimerHandle | None = None
        self._under_way: set[RequestInFlight] = set()
        if below is not None:
            pool.on_room = self._look_soon

    def goes_on(self, request: RequestInFlight, completion: Completion) -> bool:
        """Whether an attempt ended so that the request goes on elsewhere: nobody else has ended it."""
        if not request.is_leaving or request.aborted or completion.finish_reason is not FinishReason.ABORT:
            return False
        self.num_moved = (self.num_moved or 0) + 1
        source, place = request.replica, request.place
        if source is not None and place is not None and _is_behind(place.replica, source, completion):
            request.give_place_back()  # the one has pulled meanwhile, and the other has not yet: it stays
            request.place = self._pool.reserve(source, request.partial.request)
        return True

    def place(self, request: RequestInFlight) -> Reservation | None:
        """What is kept for a request where it goes on. None: it waits, and is placed, as any other."""
        if (place := request.place) is None:
            return None
        replica = place.replica
        if replica.failures or not (replica.serving or replica.draining):
            request.give_place_back()
            return None
        if not self._pause.open.is_set() and self._pause.mode is not PauseMode.WAIT:
            return None
        if replica.serving and (session_id := request.partial.request.session_id) is not None:
            self._pool.strategy.moved(session_id, replica)
        request.place = None
        return place

    def close(self) -> None:
        self._pool.on_room = None
        if self._timer is not None:
            self._timer.cancel()

    def _look_soon(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._look)

    def _look(self) -> None:
        self._timer = None
        if not self._pause.open.is_set():
            return
        leaving: defaultdict[PooledReplica, list[RequestInFlight]] = defaultdict(list)
        counts = self._counts()
        versions = {replica.version for replica in counts}
        if len(versions) > 1:
            self._look_soon()
        for version in versions:
            alike = {replica: count for replica, count in counts.items() if replica.version == version}
            for source, request, target in self._planned(alike):
                request.leave(self._pool.reserve(target, request.partial.request))
                self._under_way.add(request)
                leaving[source].append(request)
        for replica, requests in leaving.items():
            self._tasks.start(self._send_away(replica, requests), f"move {len(requests)} from {replica.name}")

    def _counts(self) -> dict[PooledReplica, int]:
        """Requests of each replica in service, once those have moved that are to."""
        counts = {replica: replica.num_requests for replica in self._pool if replica.serving}
        self._under_way = {request for request in self._under_way if request.place is not None}
        for request in self._under_way:
            if request.replica in counts:  # it counts where its place is
                counts[request.replica] -= 1
        return counts

    def _planned(self, counts: dict[PooledReplica, int]) -> Iterator[Planned]:
        """What is to move among replicas of one version, one after the other."""
        assert self._below is not None
        mean = sum(counts.values()) / len(counts)
        fullest = [(-count, place, replica) for place, (replica, count) in enumerate(counts.items())]
        heapq.heapify(fullest)
        movable = dict[PooledReplica, list[RequestInFlight]]()
        for target in sorted((replica for replica in counts if not replica.failures), key=counts.__getitem__):
            count, is_taking = counts[target], False
            have_none = list[tuple[int, int, PooledReplica]]()
            while fullest and count + 1 <= mean and count + 2 <= -fullest[0][0]:
                most, place, source = fullest[0]
                if not is_taking and count > self._below * -most:
                    break
                if source not in movable:
                    movable[source] = self._movable(source)
                if (request := _last_for(target, movable[source])) is None:
                    have_none.append(heapq.heappop(fullest))
                    continue
                yield source, request, target
                heapq.heapreplace(fullest, (most + 1, place, source))
                count, is_taking = count + 1, True
            for one in have_none:
                heapq.heappush(fullest, one)

    def _movable(self, replica: PooledReplica) -> list[RequestInFlight]:
        """In the order in which they were sent. There is another look where some will be when they have doubled."""
        free = [
            request
            for request in self._requests.on(replica)
            if not (request.is_leaving or request.aborted or _must_stay(request.partial.request.sampling))
        ]
        due = [one for one in free if one.moved_with is None or one.partial.num_tokens > 2 * one.moved_with]
        if len(due) < len(free):
            self._look_soon()
        return due

    async def _send_away(self, replica: PooledReplica, requests: Sequence[RequestInFlight]) -> None:
        """Have a replica end requests, and again while it has some: one may reach its engine after the first call."""

        def left() -> list[RequestInFlight]:
            return [request for request in requests if request.is_leaving and request.replica is replica]

        try:
            async with asyncio.timeout(self._limits.abort_s):
                while ids := [request.engine_id for request in left()]:
                    await self._aborts.send(replica, ids)
                    await asyncio.sleep(self._limits.reabort_interval_s)
        except TimeoutError:
            for request in left():  # they stay, and may end there
                request.give_place_back()


def _must_stay(sampling: SamplingParams) -> bool:
    return sampling.seed is not None or bool(sampling.presence_penalty or sampling.frequency_penalty)


def _last_for(target: PooledReplica, requests: list[RequestInFlight]) -> RequestInFlight | None:
    """Take out the last that `target` has not failed."""
    for place in reversed(range(len(requests))):
        if target not in requests[place].failed_on:
            return requests.pop(place)
    return None


def _is_behind(target: PooledReplica, source: PooledReplica, completion: Completion) -> bool:
    """Whether it has an older version than the newest token."""
    if target.version is None:
        return source.version is not None
    spans = completion.version_spans
    return bool(spans) and target.version < spans[-1].version

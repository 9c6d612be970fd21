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
from titan_rl.generation.router.pool import Pool, PooledReplica
from titan_rl.types import Completion, FinishReason

LOOK_S = 1.0
"""From an answer, or a replica that came into service, to the look at what others have."""


class Moves:
    """Evens out how many requests the replicas have, which a strategy cannot: it places each of them once.

    A replica that has at most `below` of the requests of the fullest, as one that answers have left or that has just
    joined, gets requests of the fullest, up to the mean. These are told to end them as for an abort, so that each comes
    back with all of its tokens, and goes on in the other place: none is lost, or generated again. Those that came last
    move: they may wait in an engine still, and have the fewest tokens to be computed anew. One moves again when its
    tokens have more than doubled, so that of an answer no more is computed anew than twice its tokens, and as many
    prompts as it has doublings. One with a seed stays: behind a seam it draws another answer.

    A look costs a pass over the replicas, and a logarithm of their number for each request that moves.

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

    def is_moved(self, request: RequestInFlight, completion: Completion) -> bool:
        """Whether an attempt ended so that the request goes on elsewhere: nobody else has ended it."""
        is_moved = (
            request.moves_to is not None and completion.finish_reason is FinishReason.ABORT and not request.aborted
        )
        if is_moved:
            self.num_moved = (self.num_moved or 0) + 1
        return is_moved

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
        for source, target in self._planned(self._counts()):
            request = next(self._movable(source), None)
            if request is None:  # all of its requests are on their way already
                break
            request.moves_to, request.moved_with = target, request.partial.num_tokens
            self._under_way.add(request)
            leaving[source].append(request)
        for replica, requests in leaving.items():
            self._tasks.start(self._send_away(replica, requests), f"move {len(requests)} from {replica.name}")

    def _counts(self) -> dict[PooledReplica, int]:
        """Requests of each replica in service, once those have moved that are to."""
        counts = {replica: replica.num_requests for replica in self._pool if replica.serving}
        self._under_way = {request for request in self._under_way if request.moves_to and not request.done.done()}
        for request in self._under_way:
            if request.replica in counts:
                counts[request.replica] -= 1
            if request.moves_to in counts:
                counts[request.moves_to] += 1
        return counts

    def _planned(self, counts: dict[PooledReplica, int]) -> Iterator[tuple[PooledReplica, PooledReplica]]:
        """From where and to where a request is to move, one after the other."""
        if len(counts) < 2 or self._below is None:
            return
        mean = sum(counts.values()) / len(counts)
        fullest = [(-count, place, replica) for place, (replica, count) in enumerate(counts.items())]
        heapq.heapify(fullest)
        for target in sorted(counts, key=counts.__getitem__):
            count = counts[target]
            if count > self._below * -fullest[0][0]:
                return
            while count + 1 <= mean and count + 2 <= -fullest[0][0]:
                most, place, source = fullest[0]
                yield source, target
                heapq.heapreplace(fullest, (most + 1, place, source))
                count += 1

    def _movable(self, replica: PooledReplica) -> Iterator[RequestInFlight]:
        """Those that came last first."""
        for request in reversed(self._requests.on(replica)):
            is_seeded = request.partial.request.sampling.seed is not None
            is_free = request.moves_to is None and not (request.aborted or is_seeded)
            if is_free and (request.moved_with is None or request.partial.num_tokens > 2 * request.moved_with):
                yield request

    async def _send_away(self, replica: PooledReplica, requests: Sequence[RequestInFlight]) -> None:
        """Have a replica end requests, and again while it has some: one may reach its engine after the first call."""
        try:
            async with asyncio.timeout(self._limits.abort_s):
                while ids := [one.engine_id for one in requests if one.moves_to and one.replica is replica]:
                    await self._aborts.send(replica, ids)
                    await asyncio.sleep(self._limits.reabort_interval_s)
        except TimeoutError:
            pass  # they stay, and may end there

"""Dispatch of one request: wait for a replica, send, judge failures, fail over, and move to emptier replicas."""

from __future__ import annotations

import asyncio
import heapq
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from titan_rl.core.calls import stopwatch
from titan_rl.core.calls.stopwatch import moving_with_tokens
from titan_rl.core.errors import EngineDeadError, EngineStalledError, GenerationError, NoReplicaError, RequestError
from titan_rl.generation.request import EngineRequest, OnChunk, aborted_late, tokens_between
from titan_rl.generation.router.control import Pause
from titan_rl.generation.router.health import BackgroundTasks, Health, StallWatch
from titan_rl.generation.router.pool import Pool, PooledReplica, Reservation
from titan_rl.generation.router.replica import Limits
from titan_rl.generation.router.requests import Aborts, NotResumedError, RequestInFlight, RequestsInFlight
from titan_rl.generation.types import PauseMode
from titan_rl.types import Completion, FinishReason, SamplingParams, TokenChunk


class Dispatcher:
    """Sends a request to one replica after the other until it is answered. The caller's own task owns the answer."""

    def __init__(
        self,
        pool: Pool,
        requests: RequestsInFlight,
        health: Health,
        pause: Pause,
        aborts: Aborts,
        stalls: StallWatch,
        moves: Moves,
        tasks: BackgroundTasks,
        limits: Limits,
        *,
        max_attempts: int,
    ) -> None:
        if max_attempts < 1:
            raise ValueError(f"max_attempts is {max_attempts!r}; it must be at least 1")
        self.closed: EngineDeadError | None = None
        self._pool = pool
        self._requests = requests
        self._blame = Blame(health, limits.blame_s, max_attempts)
        self._pause = pause
        self._aborts = aborts
        self._stalls = stalls
        self._moves = moves
        self._tasks = tasks
        self._limits = limits
        self._max_attempts = max_attempts

    async def generate(self, request: EngineRequest, on_chunk: OnChunk | None = None) -> Completion:
        failures: list[FailedAttempt] = []

        def end() -> None:
            self._tasks.start(self._end(request.request_id), f"end {request.request_id}")

        with stopwatch.ending_with(end), self._requests.track(request) as in_flight:
            partial = in_flight.partial
            while (reservation := await self._reserve(in_flight)) is not None:
                failure: FailedAttempt | None = None
                with reservation as replica:
                    epoch = replica.epoch
                    try:
                        completion = await self._send(in_flight, replica, on_chunk)
                        if not self._moves.goes_on(in_flight, completion):
                            return completion
                    except (RequestError, NotResumedError):
                        raise
                    except Exception as error:
                        partial.keep_chunks()
                        if not in_flight.was_cut_short:  # else aborted, or its replica was removed: nobody's failure
                            failure = FailedAttempt(replica, epoch, error, replica.num_served)
                    finally:
                        in_flight.unassign()
                if failure is not None:
                    in_flight.failed_on.add(failure.replica)
                    if not in_flight.was_moved:  # else it did not ask for this attempt, and had a good one
                        failures.append(failure)
                    is_its_own = partial.ended is None and not in_flight.was_moved
                    await self._blame.lay(in_flight, failures if is_its_own else [failure])
                if not in_flight.aborted and (ended := partial.ended) is not None:
                    return ended  # the replica was lost, or told to let it go, between its last token and its answer
                if len(failures) == self._max_attempts:
                    last = failures[-1].error
                    raise GenerationError(
                        f"request {request.request_id!r} failed on {len(failures)} replicas; the last: {last!r}"
                    ) from last
            return partial.so_far

    async def _end(self, request_id: str) -> None:
        """Abort a request whose rollout has used up its time."""
        await self._requests.abort(self._requests.find([request_id]))

    async def _reserve(self, in_flight: RequestInFlight) -> Reservation | None:
        """Wait until the router is not paused and a replica serves. None: the request is aborted."""
        while True:
            if self.closed is not None:
                raise self.closed
            if in_flight.aborted or self._pause.mode == "abort":
                return None
            if (place := self._moves.place(in_flight)) is not None:
                return place
            try:
                if self._pause.open.is_set() and self._pool.enough.is_set():
                    return self._pool.choose(in_flight.partial.request)
                with stopwatch.paused():
                    if not self._pause.open.is_set():
                        began = asyncio.get_running_loop().time()
                        await in_flight.within(self._limits.paused_s, self._pause.open.wait())
                        in_flight.interrupted_s += asyncio.get_running_loop().time() - began
                    else:
                        await in_flight.within(self._limits.no_replica_s, self._pool.enough.wait())
            except TimeoutError:
                if in_flight.was_cut_short:
                    continue
                if not self._pause.open.is_set():
                    raise self._pause.not_resumed() from None
                cause = self._pool.last_error
                waited_s = self._limits.no_replica_s
                served = "no replica" if self._pool.least == 1 else f"fewer than {self._pool.least} replicas"
                why = self._pool.trouble() if cause is None else f"the last failed: {cause!r}"
                raise NoReplicaError(f"{served} served within {waited_s:g} s; {why}") from cause

    async def _send(self, in_flight: RequestInFlight, replica: PooledReplica, on_chunk: OnChunk | None) -> Completion:
        """One attempt on one replica. `on_chunk` is called with the chunks that are kept of it, and with no others."""
        began, is_over = asyncio.get_running_loop().time(), False
        partial = in_flight.partial
        request, keep = in_flight.assign(replica), partial.begin()
        try:
            with self._stalls.watching(replica), moving_with_tokens(replica.calls.streams) as on_sign:

                def receive(chunk: TokenChunk) -> None:
                    has_tokens = bool(chunk.token_ids)
                    replica.hear(served=has_tokens)
                    on_sign(has_tokens)
                    if has_tokens and not is_over:
                        keep(chunk)
                        if on_chunk is not None:
                            on_chunk(chunk)

                completion = await in_flight.within(None, replica.calls.generate(request, receive))
        except (TimeoutError, EngineStalledError, NotResumedError, asyncio.CancelledError):
            self._aborts.send_soon(replica, in_flight.engine_id)  # the engine may be at it still
            raise
        finally:
            is_over = True
        replica.hear(served=True)
        replica.failures = 0
        num_told = partial.num_tokens
        completion = partial.add(_without_freezes(completion, in_flight, began))
        if on_chunk is not None and in_flight.is_leaving and num_told < partial.num_tokens:
            on_chunk(
                tokens_between(completion, num_told, partial.num_tokens)
            )  # what the next attempt tells goes on from
        if in_flight.interrupted_s:
            metrics = {**completion.metrics, "interrupted_s": in_flight.interrupted_s}
            completion = replace(completion, metrics=metrics)
        if in_flight.aborted:
            return aborted_late(completion)
        return completion


def _without_freezes(completion: Completion, in_flight: RequestInFlight, began: float) -> Completion:
    """The answer of an attempt that began then. An engine counts in `queue_s` what it was paused for as well; that is
    in `interrupted_s`, and no second is in both."""
    queue_s = completion.metrics.get("queue_s", 0.0)
    frozen_s = in_flight.frozen_s(began, began + queue_s)
    return (
        replace(completion, metrics={**completion.metrics, "queue_s": queue_s - frozen_s}) if frozen_s else completion
    )


@dataclass(frozen=True, slots=True)
class FailedAttempt:
    """One attempt of a request that failed."""

    replica: PooledReplica
    epoch: int  # the replica's, when the attempt began
    error: Exception
    num_served: int  # signs of service to other requests, when it failed

    @property
    def outlived(self) -> bool:
        """The replica has served others since."""
        return self.replica.num_served > self.num_served

    @property
    def may_be_outlived(self) -> bool:
        return self.outlived or self.replica.num_requests > 0


class Blame:
    """Decision whether a replica or the request is at fault for a failure.

    The first is laid to the replica, which leaves service for a moment at least; that of an engine that ended or hangs
    always is. If the request fails in the same way on another replica, or on the same one in all attempts that it has,
    and those that failed it go on to serve others, it is the request's fault: it fails alone, and the last replica
    stays in service. Before that, failures on one replica are that replica's, which may be flaky. While they have no
    others to serve, nobody can tell, and nobody else is hurt.

    Args:
        wait_s: how long the replicas have to serve others.
        max_attempts: failures of a request that are its last.
    """

    def __init__(self, health: Health, wait_s: float, max_attempts: int) -> None:
        self._health = health
        self._wait_s = wait_s
        self._max_attempts = max_attempts

    async def lay(self, request: RequestInFlight, failures: list[FailedAttempt]) -> None:
        """Attribute the last of a request's failures, and quarantine the replica if it is at fault.

        Raises:
            RequestError: it is the request's fault.
        """
        last = failures[-1]
        alike = [failure for failure in failures if type(failure.error) is type(last.error)]
        is_lost = isinstance(last.error, EngineDeadError | EngineStalledError)
        follows_request = len({failure.replica for failure in alike}) > 1 or len(alike) == self._max_attempts > 1
        if follows_request and not is_lost and all(failure.may_be_outlived for failure in alike):
            try:
                with stopwatch.paused():
                    await request.within(None, asyncio.sleep(self._wait_s))
            except TimeoutError:
                return  # the request is aborted, or the router closed
            if all(failure.outlived for failure in alike):
                names = ", ".join(failure.replica.name for failure in alike)
                raise RequestError(
                    f"request {request.request_id!r} failed {len(alike)} times in the same way, on {names}, which went "
                    f"on to serve others: {last.error!r}"
                ) from last.error
        self._health.quarantine(last.replica, last.error, last.epoch)


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
        """The reservation for a request that moves. None: it waits, and is placed, like any other."""
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
        """Plan moves among replicas of one version, one after the other."""
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

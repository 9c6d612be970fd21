"""Dispatch of one request: wait for a replica, send, attribute failures, fail over, and move to emptier replicas."""

from __future__ import annotations

import asyncio
import heapq
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, replace

from titan_rl.core.calls import stopwatch
from titan_rl.core.calls.stopwatch import moving_with_tokens
from titan_rl.core.errors import EngineDeadError, EngineStalledError, GenerationError, NoReplicaError, RequestError
from titan_rl.generation.request import EngineRequest, OnChunk, aborted_late
from titan_rl.generation.router.control import Pause
from titan_rl.generation.router.pool import Pool, PooledReplica, Reservation
from titan_rl.generation.router.replica import OpenCalls
from titan_rl.generation.router.requests import CutShortError, NotResumedError, RequestInFlight, RequestsInFlight
from titan_rl.generation.types import PauseMode
from titan_rl.types import Completion, FinishReason, SamplingParams, TokenChunk


@dataclass(frozen=True, slots=True)
class Answered:
    """Outcome of an attempt that the replica ended by itself."""

    completion: Completion


@dataclass(frozen=True, slots=True)
class Aborted:
    """Outcome of an attempt at a request that was aborted, with the tokens that came back."""

    completion: Completion


@dataclass(frozen=True, slots=True)
class Moved:
    """Outcome of an attempt that the router ended, so that the request continues on another replica."""


@dataclass(frozen=True, slots=True)
class Failed:
    """Outcome of an attempt that failed."""

    replica: PooledReplica
    epoch: int  # epoch of the replica when the attempt began
    error: Exception
    num_served: int  # `replica.num_served` when the attempt failed

    @property
    def outlived(self) -> bool:
        """Whether the replica has served other requests since the failure."""
        return self.replica.num_served > self.num_served

    @property
    def may_be_outlived(self) -> bool:
        return self.outlived or self.replica.num_requests > 0


@dataclass(eq=False)
class Dispatcher:
    """Sends a request to one replica after the other until it is answered, in the caller's own task.

    Args:
        max_attempts: Number of failed attempts after which a request fails.
        move_below: Argument `below` of `Moves`.

    Raises:
        ValueError: `max_attempts` is less than 1, or `move_below` is out of range.
    """

    pool: Pool
    requests: RequestsInFlight
    pause: Pause
    calls: OpenCalls
    _: KW_ONLY
    max_attempts: int
    move_below: float | None

    def __post_init__(self) -> None:
        if self.max_attempts < 1:
            raise ValueError(f"max_attempts is {self.max_attempts!r}; it must be at least 1")
        self.moves = Moves(self.pool, self.requests, self.pause, self.move_below)
        self.limits = self.pool.limits

    async def generate(self, request: EngineRequest, on_chunk: OnChunk | None = None) -> Completion:
        """Answer a request; see `GeneratorRouter.stream`."""
        async with self.calls.one():
            with self.requests.track(request, on_chunk) as in_flight, stopwatch.ending_with(in_flight.abort_soon):
                failures: list[Failed] = []
                while (reservation := await self._reserve(in_flight)) is not None:
                    was_moved = in_flight.is_leaving  # the router, not a failure, caused this attempt
                    with reservation as replica:
                        outcome = await self._send(in_flight, replica)
                    if isinstance(outcome, Answered | Aborted):
                        return outcome.completion
                    ended = in_flight.partial.ended
                    if isinstance(outcome, Failed):
                        in_flight.failed_on.add(outcome.replica)
                        if not was_moved:
                            failures.append(outcome)
                        await self._judge(in_flight, [outcome] if was_moved or ended is not None else failures)
                    if ended is not None and not in_flight.aborted:
                        return ended  # the attempt ended between its last token and its answer
                    if len(failures) == self.max_attempts:
                        raise self._given_up(request, failures) from failures[-1].error
                return in_flight.partial.so_far

    @staticmethod
    def _given_up(request: EngineRequest, failures: Sequence[Failed]) -> GenerationError:
        count = len({failure.replica.name for failure in failures})
        on = f"{count} replica{'s' if count > 1 else ''}"
        attempts = f" in {len(failures)} attempts" if count < len(failures) else ""
        last = failures[-1].error
        return GenerationError(f"request {request.request_id!r} failed on {on}{attempts}; the last: {last!r}")

    async def _reserve(self, in_flight: RequestInFlight) -> Reservation | None:
        """Reserve a slot on a replica, once the router is not paused and enough replicas serve. None if the request is
        aborted."""
        while True:
            if in_flight.aborted or self.pool.target.mode is PauseMode.ABORT:
                return None
            if (reservation := self.moves.take_reservation(in_flight)) is not None:
                return reservation
            is_open = self.pause.open.is_set()
            if is_open and self.pool.enough.is_set():
                return self.pool.choose(in_flight.partial.request)
            try:
                with stopwatch.paused():
                    if is_open:
                        await in_flight.within(self.limits.no_replica_s, self.pool.enough.wait())
                    else:
                        began = asyncio.get_running_loop().time()
                        await in_flight.within(self.limits.paused_s, self.pause.open.wait())
                        in_flight.interrupted_s += asyncio.get_running_loop().time() - began
            except CutShortError:
                continue
            except TimeoutError:
                if not self.pause.open.is_set():
                    raise self.pause.not_resumed() from None
                cause, waited_s = self.pool.last_error, self.limits.no_replica_s
                served = "no replica" if self.pool.least == 1 else f"fewer than {self.pool.least} replicas"
                why = self.pool.trouble() if cause is None else f"the last failed: {cause!r}"
                raise NoReplicaError(f"{served} served within {waited_s:g} s; {why}") from cause

    async def _send(self, in_flight: RequestInFlight, replica: PooledReplica) -> Answered | Aborted | Moved | Failed:
        """Make one attempt on one replica.

        Raises:
            RequestError: the request can never succeed.
            NotResumedError: a pause was not resumed in time.
        """
        partial, epoch, began = in_flight.partial, replica.epoch, asyncio.get_running_loop().time()
        request = in_flight.assign(replica)
        try:
            with partial.attempt() as keep, moving_with_tokens(replica.calls.streams) as on_sign:

                def receive(chunk: TokenChunk) -> None:
                    has_tokens = bool(chunk.token_ids)
                    replica.note_alive(served=has_tokens)
                    on_sign(has_tokens)
                    keep(chunk)

                answer = await in_flight.within(None, replica.calls.generate(request, receive))
                completion = partial.add(in_flight.without_freezes(answer, began))
            replica.note_alive(served=True)
            replica.failures = 0
        except (NotResumedError, asyncio.CancelledError):
            in_flight.orphan()
            raise
        except RequestError:
            raise
        except CutShortError:
            in_flight.orphan()
            return Aborted(partial.so_far) if in_flight.aborted else Moved()
        except Exception as error:
            if isinstance(error, TimeoutError | EngineStalledError):
                in_flight.orphan()
            return Failed(replica, epoch, error, replica.num_served)
        finally:
            in_flight.unassign()
        if in_flight.interrupted_s:
            metrics = {**completion.metrics, "interrupted_s": in_flight.interrupted_s}
            completion = replace(completion, metrics=metrics)
        if in_flight.aborted:
            return Aborted(aborted_late(completion))
        if in_flight.is_leaving and completion.finish_reason is FinishReason.ABORT:
            self.moves.came_back(in_flight, replica, completion)
            return Moved()
        return Answered(completion)

    async def _judge(self, request: RequestInFlight, failures: list[Failed]) -> None:
        """Decide whether the replica or the request is at fault for the last failure, and quarantine the replica if it
        is.

        The replica is at fault for the first failure, and for every failure of an engine that ended or hangs. If the
        request fails in the same way on another replica, or on the same one in all of its attempts, and these replicas
        serve other requests afterwards, then the request is at fault: it fails alone, and the last replica stays in
        service. Otherwise repeated failures on one replica are blamed on the replica, which may be flaky. A replica
        without other requests cannot prove that it works, so its failures count against it; no other request suffers.

        Raises:
            RequestError: the request is at fault.
        """
        last = failures[-1]
        alike = [failure for failure in failures if type(failure.error) is type(last.error)]
        is_lost = isinstance(last.error, EngineDeadError | EngineStalledError)
        follows_request = len({failure.replica for failure in alike}) > 1 or len(alike) == self.max_attempts > 1
        if follows_request and not is_lost and all(failure.may_be_outlived for failure in alike):
            try:
                with stopwatch.paused():
                    await request.within(None, asyncio.sleep(self.limits.blame_s))
            except CutShortError:
                return  # the request is aborted
            if all(failure.outlived for failure in alike):
                names = ", ".join(failure.replica.name for failure in alike)
                raise RequestError(
                    f"request {request.request_id!r} failed {len(alike)} times in the same way, on {names}, which then "
                    f"served others: {last.error!r}"
                ) from last.error
        self.pool.quarantine(last.replica, last.error, last.epoch)


LOOK_S = 1.0
"""Delay between an event that may call for moves and the check of the numbers of requests."""

PlannedMove = tuple[PooledReplica, RequestInFlight, PooledReplica]  # source, request and target


class Moves:
    """Evens out the numbers of requests of the replicas, because a strategy places each request only once.

    A replica whose number of requests is at most `below` times that of the fullest replica with movable requests
    receives requests from it, up to the mean. A request that moves is ended like an aborted one, returns with all of
    its tokens, and continues in a slot that is reserved from then on: no token is lost or generated again, and a drain
    or a pause that waits for the target to be idle also waits for the request.

    Requests that were sent last move first: they may still be queued in an engine, and have the fewest tokens whose KV
    cache must be recomputed. A request may move again once its tokens have more than doubled; so at most twice as many
    tokens as the answer has are recomputed. A request with a seed stays, because it would draw another answer, and so
    does a request with penalties that count its own tokens.

    The target must have the same version, so that no answer returns to older weights, must have answered since its last
    failure, and must not have failed this request. A failure on the target does not count as an attempt of the request.

    Checks run `LOOK_S` after an answer, after a replica enters service and after a resume, and are repeated while moves
    only wait for tokens to double or a pull to end. A check costs a pass over the replicas, a pass over the requests of
    the fullest replicas, and the logarithm of the number of replicas for each move.

    Args:
        below: Share of the fullest replica's requests, above 0 and less than 1; None for no moves.

    Raises:
        ValueError: `below` is out of range.
    """

    def __init__(self, pool: Pool, requests: RequestsInFlight, pause: Pause, below: float | None) -> None:
        if below is not None and not 0 < below < 1:
            raise ValueError(f"move_below is {below!r}; it must be above 0 and less than 1, or None")
        self.num_moved = None if below is None else 0  # number of requests moved so far
        self._pool = pool
        self._requests = requests
        self._pause = pause
        self._below = below
        self._timer: asyncio.TimerHandle | None = None
        self._under_way: set[RequestInFlight] = set()
        if below is not None:
            pool.on_room = self._look_soon

    def came_back(self, request: RequestInFlight, source: PooledReplica, completion: Completion) -> None:
        """Note that `source` has ended an attempt of a request that moves."""
        self.num_moved = (self.num_moved or 0) + 1
        reservation = request.reservation
        if reservation is not None and _is_behind(reservation.replica, source, completion):
            # The source has pulled a new version in the meantime, but the target has not: the request stays.
            request.release_reservation()
            request.reservation = Reservation(source, request.partial.request.cost, self._pool)

    def take_reservation(self, request: RequestInFlight) -> Reservation | None:
        """Reservation of a request that moves; None for a request that the strategy places."""
        if (reservation := request.reservation) is None:
            return None
        replica = reservation.replica
        if replica.failures or not replica.healthy:
            request.release_reservation()
            return None
        if not self._pause.open.is_set() and self._pool.target.mode is not PauseMode.WAIT:
            return None
        if replica.serving and (session_id := request.partial.request.session_id) is not None:
            self._pool.strategy.moved(session_id, replica)
        request.reservation = None
        return reservation

    def close(self) -> None:
        self._pool.on_room = lambda: None
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
                request.leave(Reservation(target, request.partial.request.cost, self._pool))
                self._under_way.add(request)
                leaving[source].append(request)
        for replica, requests in leaving.items():
            self._pool.tasks.start(self._send_away(replica, requests), f"move {len(requests)} from {replica.name}")

    def _counts(self) -> dict[PooledReplica, int]:
        """Number of requests that each replica in service will have after the moves in progress."""
        counts = {replica: replica.num_requests for replica in self._pool if replica.serving}
        self._under_way = {request for request in self._under_way if request.reservation is not None}
        for request in self._under_way:
            if request.replica in counts:  # the request already counts for its target
                counts[request.replica] -= 1
        return counts

    def _planned(self, counts: dict[PooledReplica, int]) -> Iterator[PlannedMove]:
        """Plan moves among replicas of one version, one after the other."""
        assert self._below is not None
        mean = sum(counts.values()) / len(counts)
        fullest = [(-count, index, replica) for index, (replica, count) in enumerate(counts.items())]
        heapq.heapify(fullest)
        movable = dict[PooledReplica, list[RequestInFlight]]()
        for target in sorted((replica for replica in counts if not replica.failures), key=counts.__getitem__):
            count, is_taking = counts[target], False
            exhausted = list[tuple[int, int, PooledReplica]]()
            while fullest and count + 1 <= mean and count + 2 <= -fullest[0][0]:
                most, index, source = fullest[0]
                if not is_taking and count > self._below * -most:
                    break
                if source not in movable:
                    movable[source] = self._movable(source)
                if (request := _last_for(target, movable[source])) is None:
                    exhausted.append(heapq.heappop(fullest))
                    continue
                yield source, request, target
                heapq.heapreplace(fullest, (most + 1, index, source))
                count, is_taking = count + 1, True
            for one in exhausted:
                heapq.heappush(fullest, one)

    def _movable(self, replica: PooledReplica) -> list[RequestInFlight]:
        """Requests of a replica that may move, in the order in which they were sent. If others may move once their
        tokens have doubled, another check is scheduled."""
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
        """Make a replica end requests. Repeated while some remain, because a request may reach its engine after the
        abort."""
        limits, left = self._pool.limits, list(requests)
        try:
            async with asyncio.timeout(limits.abort_s):
                while left := [request for request in left if request.is_leaving and request.replica is replica]:
                    await self._pool.aborts.send(replica, [request.engine_id for request in left])
                    await asyncio.sleep(limits.reabort_interval_s)
        except TimeoutError:
            for request in left:
                if request.is_leaving and request.replica is replica:  # the request stays, and may end there
                    request.release_reservation()


def _must_stay(sampling: SamplingParams) -> bool:
    return sampling.seed is not None or bool(sampling.presence_penalty or sampling.frequency_penalty)


def _last_for(target: PooledReplica, requests: list[RequestInFlight]) -> RequestInFlight | None:
    """Remove and return the last request that `target` has not failed."""
    for index in reversed(range(len(requests))):
        if target not in requests[index].failed_on:
            return requests.pop(index)
    return None


def _is_behind(target: PooledReplica, source: PooledReplica, completion: Completion) -> bool:
    """Whether the target has an older version than the newest token."""
    if target.version is None:
        return source.version is not None
    spans = completion.version_spans
    return bool(spans) and target.version < spans[-1].version

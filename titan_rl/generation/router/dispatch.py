"""Carrying one request to an answer: wait, choose, send, and send again elsewhere."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from titan_rl.core.calls import stopwatch
from titan_rl.core.calls.stopwatch import moving_with_tokens
from titan_rl.core.errors import EngineDeadError, EngineStalledError, GenerationError, NoReplicaError, RequestError
from titan_rl.generation.partial import aborted_late, tokens_between
from titan_rl.generation.request import EngineRequest, OnChunk
from titan_rl.generation.router.aborts import Aborts
from titan_rl.generation.router.blame import Blame, FailedAttempt
from titan_rl.generation.router.health import Health
from titan_rl.generation.router.in_flight import RequestInFlight, RequestsInFlight
from titan_rl.generation.router.limits import Limits
from titan_rl.generation.router.moves import Moves
from titan_rl.generation.router.pause import Pause
from titan_rl.generation.router.pool import Pool, PooledReplica, Reservation
from titan_rl.generation.router.stall import StallWatch
from titan_rl.generation.router.waiter import NotResumedError
from titan_rl.types import Completion, TokenChunk


class Dispatcher:
    """What `GeneratorRouter.generate` does. An answer has one owner: the caller's own task."""

    def __init__(
        self,
        pool: Pool,
        requests: RequestsInFlight,
        health: Health,
        pause: Pause,
        aborts: Aborts,
        stalls: StallWatch,
        moves: Moves,
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
        self._limits = limits
        self._max_attempts = max_attempts

    async def generate(self, request: EngineRequest, on_chunk: OnChunk | None = None) -> Completion:
        failures: list[FailedAttempt] = []
        with self._requests.track(request) as in_flight:
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

    async def _reserve(self, in_flight: RequestInFlight) -> Reservation | None:
        """Wait until requests may pass and a replica serves. None: the request is aborted."""
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

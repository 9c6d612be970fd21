"""Carrying one request to an answer: wait, choose, send, and send again elsewhere."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from titan_rl.calls import stopwatch
from titan_rl.errors import EngineDeadError, EngineStalledError, GenerationError, NoReplicaError, RequestError
from titan_rl.generation.partial import Partial, aborted_late
from titan_rl.generation.request import EngineRequest, OnChunk
from titan_rl.generation.router.aborts import Aborts
from titan_rl.generation.router.blame import Blame, Failure
from titan_rl.generation.router.flight import Flight, Flights, NotResumedError
from titan_rl.generation.router.health import Health
from titan_rl.generation.router.limits import Limits
from titan_rl.generation.router.member import Member
from titan_rl.generation.router.pause import Pause
from titan_rl.generation.router.pool import Pool, Reservation
from titan_rl.generation.router.stall import StallWatch
from titan_rl.types import Completion, TokenChunk


class Dispatcher:
    """What `GeneratorRouter.generate` does. An answer has one owner: the caller's own task."""

    def __init__(
        self,
        pool: Pool,
        flights: Flights,
        health: Health,
        pause: Pause,
        aborts: Aborts,
        stalls: StallWatch,
        limits: Limits,
        *,
        max_attempts: int,
    ) -> None:
        if max_attempts < 1:
            raise ValueError(f"max_attempts is {max_attempts!r}; it must be at least 1")
        self.closed: EngineDeadError | None = None
        self._pool = pool
        self._flights = flights
        self._blame = Blame(health, limits.judge_s)
        self._pause = pause
        self._aborts = aborts
        self._stalls = stalls
        self._limits = limits
        self._max_attempts = max_attempts

    async def generate(self, request: EngineRequest, tell: OnChunk | None = None) -> Completion:
        failures: list[Failure] = []
        with self._flights.track(request) as flight:
            assert flight.partial is not None
            partial = flight.partial
            while (reservation := await self._board(flight, request)) is not None:
                failure: Failure | None = None
                with reservation as member:
                    epoch = member.epoch
                    flight.depart(member)
                    try:
                        return await self._send(flight, member, partial, tell)
                    except (RequestError, NotResumedError):
                        raise
                    except Exception as error:
                        partial.keep_chunks()
                        if not flight.interrupted:  # else aborted, or its replica was removed: nobody's failure
                            failure = Failure(member, epoch, error, member.num_served)
                    finally:
                        flight.member = None
                if failure is not None:
                    failures.append(failure)
                    await self._blame.lay(flight, failures if partial.ended is None else [failure])
                if not flight.aborted and (ended := partial.ended) is not None:
                    return ended  # the replica was lost between its last token and its answer
                if len(failures) == self._max_attempts:
                    last = failures[-1].error
                    raise GenerationError(
                        f"request {request.request_id!r} failed on {len(failures)} replicas; the last: {last!r}"
                    ) from last
            return partial.so_far

    async def _board(self, flight: Flight, request: EngineRequest) -> Reservation | None:
        """Wait until requests may pass and a replica serves. None: the request is aborted."""
        while True:
            if self.closed is not None:
                raise self.closed
            if flight.aborted or self._pause.mode == "abort":
                return None
            try:
                if self._pause.open.is_set() and self._pool.serving.is_set():
                    return self._pool.choose(request)
                with stopwatch.paused():
                    if not self._pause.open.is_set():
                        began = asyncio.get_running_loop().time()
                        await flight.within(self._limits.paused_s, self._pause.open.wait())
                        flight.interrupted_s += asyncio.get_running_loop().time() - began
                    else:
                        await flight.within(self._limits.no_replica_s, self._pool.serving.wait())
            except TimeoutError:
                if flight.interrupted:
                    continue
                if not self._pause.open.is_set():
                    raise self._pause.not_resumed() from None
                cause = self._pool.last_error
                waited_s = self._limits.no_replica_s
                raise NoReplicaError(f"no replica served within {waited_s:g} s; the last failed: {cause!r}") from cause

    async def _send(self, flight: Flight, member: Member, partial: Partial, tell: OnChunk | None) -> Completion:
        """One attempt on one replica. What is kept of it is told, and nothing else."""
        began, is_over = asyncio.get_running_loop().time(), False
        request, keep = replace(partial.rest, request_id=flight.engine_id), partial.begin()
        try:
            with self._stalls.watching(member), stopwatch.moving_with_tokens(member.calls.streams) as on_sign:

                def on_chunk(chunk: TokenChunk) -> None:
                    has_tokens = bool(chunk.token_ids)
                    member.hear(served=has_tokens)
                    on_sign(has_tokens)
                    if has_tokens and not is_over:
                        keep(chunk)
                        if tell is not None:
                            tell(chunk)

                completion = await flight.within(None, member.calls.generate(request, on_chunk))
        except (TimeoutError, EngineStalledError, NotResumedError, asyncio.CancelledError):
            self._aborts.tell_soon(member, flight.engine_id)  # the engine may be at it still
            raise
        finally:
            is_over = True
        member.hear(served=True)
        member.failures = 0
        completion = partial.add(_without_freezes(completion, flight, began))
        if flight.interrupted_s:
            metrics = {**completion.metrics, "interrupted_s": flight.interrupted_s}
            completion = replace(completion, metrics=metrics)
        if flight.aborted:
            return aborted_late(completion)
        return completion


def _without_freezes(completion: Completion, flight: Flight, began: float) -> Completion:
    """The answer of an attempt that began then. An engine counts in `queue_s` what it was paused for as well; that is
    in `interrupted_s`, and no second is in both."""
    queue_s = completion.metrics.get("queue_s", 0.0)
    frozen_s = flight.frozen_s(began, began + queue_s)
    return (
        replace(completion, metrics={**completion.metrics, "queue_s": queue_s - frozen_s}) if frozen_s else completion
    )

"""One `generate` over many replicas: it outlives their failures, their weight updates and pauses."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable, Sequence
from contextlib import suppress
from typing import Any

from titan_rl.core.errors import EngineDeadError, EngineStalledError
from titan_rl.generation.request import EngineRequest, OnChunk
from titan_rl.generation.resume import listener
from titan_rl.generation.router.control import ControlCalls, Pause, PauseReport, Puller, PullMode, PullReport
from titan_rl.generation.router.dispatch import Dispatcher, Moves
from titan_rl.generation.router.health import BackgroundTasks, Health, OnReplicaFailed, StallWatch
from titan_rl.generation.router.pool import Pool, PooledReplica, ReplicaStatus
from titan_rl.generation.router.replica import Limits, Replica
from titan_rl.generation.router.requests import Aborts, RequestsInFlight
from titan_rl.generation.router.strategies import LeastLoaded, StickySession, Strategy
from titan_rl.generation.types import PauseMode
from titan_rl.types import Completion, SamplingParams

logger = logging.getLogger(__name__)


class GeneratorRouter:
    """Sends each request to a replica and answers for it. `generate` is a `GenerateFn`.

    Infrastructure failures are retried on other replicas; the failed one is out of service until it has pulled the
    current weights again. While no replica serves, requests wait for one. Belongs to one event loop.

    Example: a router over two replicas, new weights, and a pause that loses nothing:

        router = GeneratorRouter([replica_0, replica_1], StickySession(fallback=LeastLoaded()))
        completion = await router.generate([1, 2, 3], request_id="g0/0/0", sampling=SamplingParams(max_tokens=64))
        await router.pull_state_dict(1)
        await router.pause("keep")
        await router.resume()
        await router.close()

    Args:
        strategy: by default `StickySession(fallback=LeastLoaded())`; not shared with another router.
        stall_timeout_s: a replica that has requests and gives no sign of life for so long has failed, and they go on
            elsewhere. Waiting in a queue that moves is no failure; time frozen by `pause("keep")` does not count.
        max_attempts: replicas that may fail under one request before the request fails.
        on_replica_failed: called once for each quarantine, so that a supervisor can respawn the replica.
        least_replicas: while fewer are in service requests wait.
        move_below: replicas with at most this part of the fullest's requests get some of them, see `Moves`.

    Raises:
        ValueError: the strategy is that of another router, or two replicas have one name.
    """

    def __init__(
        self,
        replicas: Iterable[Replica],
        strategy: Strategy | None = None,
        *,
        stall_timeout_s: float = 300.0,
        max_attempts: int = 3,
        limits: Limits | None = None,
        on_replica_failed: OnReplicaFailed | None = None,
        least_replicas: int = 1,
        move_below: float | None = None,
    ) -> None:
        limits = self._limits = limits or Limits()
        self._calls = ControlCalls()
        tasks = self._tasks = BackgroundTasks(on_error=self._fail)
        aborts = self._aborts = Aborts(tasks, limits.call_s)
        stalls = StallWatch(stall_timeout_s, self._stalled)
        requests = self._requests = RequestsInFlight(limits, aborts, stalls)
        strategy = strategy or StickySession(fallback=LeastLoaded())
        pool = self._pool = Pool(replicas, strategy, limits.cancel_s, least_replicas)
        prepared = self._is_prepared
        health = self._health = Health(
            pool, tasks, limits, prepare=self._prepare, prepared=prepared, on_failed=on_replica_failed
        )
        pause = self._pause = Pause(pool, requests, limits, health.quarantine)
        self._puller = Puller(pool, requests, limits, health)
        moves = self._moves = Moves(pool, requests, pause, aborts, tasks, limits, move_below)
        self._dispatcher = Dispatcher(
            pool, requests, health, pause, aborts, stalls, moves, tasks, limits, max_attempts=max_attempts
        )

    @property
    def replicas(self) -> tuple[ReplicaStatus, ...]:
        """Every replica with its load, version and health, for metrics."""
        return tuple(ReplicaStatus.of(replica) for replica in self._pool)

    def has_replica(self, name: str) -> bool:
        """Whether one of that name has been added, and not removed."""
        return name in self._pool

    @property
    def version(self) -> int | None:
        """The version that every replica is brought to: the newest asked for, but for those that no replica could get.
        None before the first pull."""
        return self._puller.target

    def trouble(self) -> str | None:
        """Why no request can be answered at present; None while enough replicas serve, paused or not."""
        return self._pool.trouble() if self._dispatcher.closed is None else "it is closed"

    @property
    def paused(self) -> PauseMode | None:
        """The mode of the present pause."""
        return self._pause.mode

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        *,
        request_id: str,
        session_id: str | None = None,
        sampling: SamplingParams,
    ) -> Completion:
        """The replica's completion, or what is left of it by an abort or by the end of its rollout's time, with
        `FinishReason.ABORT`.

        Raises:
            RequestError: the request can never succeed, its id is in flight, or replicas that serve others failed it in
                the same way.
            NoReplicaError: no replica came into service within the limit; the last failure is the cause.
            GenerationError: it failed on `max_attempts` replicas, or waited too long for a resume.
            EngineDeadError: the router is closed.
        """
        return await self.stream(EngineRequest(request_id, prompt_token_ids, sampling, session_id), listener())

    def stream(self, request: EngineRequest, on_chunk: OnChunk | None = None) -> Coroutine[Any, Any, Completion]:
        """Answer a request like `generate`, with chunks ahead of the completion if replicas stream. The chunks are the
        beginning of the completion, whichever replicas the request went through.

        Args:
            on_chunk: called in the event loop. What it raises is laid to the replica, so it raises nothing.
        """
        return self._dispatcher.generate(request, on_chunk)

    async def pull_state_dict(self, version: int, mode: PullMode = "hot_swap") -> PullReport:
        """Bring every replica to `version`, or to a newer one that was asked for meanwhile.

        "hot_swap" pulls while requests run. "drain" takes one replica at a time out of service and lets its requests
        finish first. A replica that cannot pull stays out of service until it can; the others go on.

        Raises:
            UnavailableWeightsError: no replica could get the version. What is served is served on.
            StateDictError: no replica serves with the version.
            RuntimeError: "drain" while paused: frozen requests cannot finish.
        """
        if mode == "drain" and self.paused is not None:
            raise RuntimeError(f"cannot drain while paused in mode '{self.paused}'; resume first, or use 'hot_swap'")
        async with self._calls.one():
            return await self._puller.pull(version, mode)

    async def pause(self, mode: PauseMode | str = PauseMode.KEEP) -> PauseReport:
        """Stop generating on every replica: "keep" freezes requests, "wait" lets them finish, "abort" ends them.

        New requests wait for `resume`; in mode "abort" they return aborted at once, and never reach a replica.
        Returns within the limits whatever the replicas do; the report says what it gave up on.

        Raises:
            RuntimeError: paused already.
            ValueError: there is no such mode.
        """
        async with self._calls.one():
            return await self._pause.pause(PauseMode(mode))

    async def resume(self) -> None:
        """Go on after `pause`; frozen requests continue where they were.

        Raises:
            RuntimeError: not paused.
        """
        async with self._calls.one():
            await self._pause.resume()

    async def wait_resumed(self) -> None:
        """Return when the router is not paused.

        Raises:
            GenerationError: it was not resumed within the limit.
        """
        async with self._calls.one():
            await self._pause.wait_open()

    async def abort(self, request_ids: Iterable[str] | None = None) -> tuple[str, ...]:
        """End requests with the tokens they have, by default all that are in flight. Later ones are not affected.

        Returns:
            Ids of requests that did not return in time and were cancelled. Unknown ids are ignored.
        """
        async with self._calls.one():
            requests = list(self._requests) if request_ids is None else self._requests.find(request_ids)
            return await self._requests.abort(requests)

    def tokens_so_far(self) -> dict[str, Completion]:
        """Tokens streamed so far for each request in flight, by id, as aborted completions."""
        return {request.request_id: request.partial.so_far for request in self._requests}

    @property
    def num_tokens_so_far(self) -> int:
        """Number of tokens of all requests in flight, without building `tokens_so_far`."""
        return sum(request.partial.num_tokens for request in self._requests)

    @property
    def num_moved(self) -> int | None:
        """Requests so far that went on at an emptier replica. None without `move_below`."""
        return self._moves.num_moved

    def finish_session(self, session_id: str) -> None:
        """Free what the strategy keeps of a session: no further request of it comes."""
        self._pool.strategy.finish_session(session_id)

    async def add_replica(self, replica: Replica) -> bool:
        """Let a replica join once it has the current version and pause state.

        Returns:
            Whether it serves; one that failed is in quarantine and is tried again.

        Raises:
            ValueError: its name is taken.
        """
        async with self._calls.one():
            pooled = self._pool.add(replica)
            try:
                await self._health.bring_up(pooled)
            except Exception as error:
                self._health.quarantine(pooled, error)
            except asyncio.CancelledError:
                self._pool.remove(pooled.name)
                raise
            return pooled.serving

    def remove_replica(self, name: str) -> None:
        """Let a replica go; its requests go on at others, from the tokens that it has streamed. Closing it is the
        caller's.

        Raises:
            ValueError: there is no replica of that name.
        """
        replica = self._pool.remove(name)
        self._aborts.forget(replica)
        for request in self._requests.on(replica):
            request.cut_short()

    async def retire_replica(self, name: str, finish_s: float) -> None:
        """Send a replica no further requests, and remove it when it is idle or after `finish_s` seconds.

        Raises:
            ValueError: there is no replica of that name.
        """
        replica = self._pool.find(name)
        self._pool.withdraw(replica, draining=True)
        with suppress(TimeoutError):
            await self._requests.wait(finish_s, replica.idle.wait())
        if not replica.removed:
            self.remove_replica(name)

    async def close(self) -> None:
        """Fail what is in flight with `EngineDeadError` and close every replica. Closing again does nothing."""
        self._shut(EngineDeadError("the router is closed"))
        if running := [request.done for request in self._requests]:
            await asyncio.wait(running, timeout=self._limits.cancel_s)
        await self._tasks.close(self._limits.cancel_s)
        await self._pool.close(self._limits.call_s)

    def _stalled(self, replica: PooledReplica, error: EngineStalledError) -> None:
        self._health.quarantine(replica, error)
        for request in self._requests.on(replica):
            request.fail(error)

    async def _prepare(self, replica: PooledReplica) -> None:
        self._aborts.send_again(replica)
        await self._puller.apply(replica)
        await self._pause.apply(replica)

    def _is_prepared(self, replica: PooledReplica) -> bool:
        return self._puller.applied(replica) and self._pause.applied(replica)

    def _shut(self, reason: EngineDeadError) -> None:
        """From now on everything fails with `reason`; the first one stands."""
        if self._calls.end(reason):
            self._dispatcher.closed = reason
            self._moves.close()
            for request in self._requests:
                request.cut_short()

    def _fail(self, error: BaseException) -> None:
        logger.error("the router failed", exc_info=error)
        reason = EngineDeadError(f"the router failed: {error!r}")
        reason.__cause__ = error
        self._shut(reason)

"""One `generate` over many replicas, through their failures, weight updates and pauses."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from titan_rl.core.errors import ActorDiedError, EngineDeadError
from titan_rl.generation.continuation import listener
from titan_rl.generation.request import EngineRequest, OnChunk
from titan_rl.generation.router.control import Pause, PauseReport, Puller, PullMode, PullReport
from titan_rl.generation.router.dispatch import Dispatcher
from titan_rl.generation.router.pool import OnReplicaFailed, Pool, PooledReplica, ReplicaStatus, Service
from titan_rl.generation.router.replica import BackgroundTasks, Limits, OpenCalls, Replica
from titan_rl.generation.router.requests import CutShortError, RequestsInFlight
from titan_rl.generation.router.shard_control import (
    Ended,
    ForDedicated,
    FromShard,
    ReplicaFailed,
    ShardLink,
    Shards,
    ToShard,
)
from titan_rl.generation.router.strategies import LeastLoaded, StickySession, Strategy
from titan_rl.generation.types import PauseMode
from titan_rl.types import Completion, SamplingParams


class DedicatedLink:
    """`ShardLink` of a dedicated replica's router, whose messages travel over a link of the router that it is part of.

    Args:
        link: Link of that router.
        dedication: Number of the dedication.
    """

    def __init__(self, link: ShardLink, dedication: int) -> None:
        self.name = link.name
        self._link = link
        self._dedication = dedication

    async def call(self, number: int, message: ToShard) -> Ended:
        return await self._link.call(number, ForDedicated(self._dedication, number, message))

    def end(self, reason: str) -> None:
        self._link.end(reason)


class Dedication:
    """Separate router for the requests that name a version, with the replica that is dedicated to them.

    Attributes:
        number: Distinguishes the dedications of a router, and increases.
        links: Links of the separate router, by the links of the router that it is part of.
        ended: Set when the replica is returned.
    """

    def __init__(self, number: int, router: GeneratorRouter) -> None:
        self.number = number
        self.router = router
        self.links: dict[ShardLink, DedicatedLink] = {}
        self.ended = asyncio.Event()


class GeneratorRouter:
    """Sends each request to a replica, and to another one if it fails. `generate` is a `GenerateFn`.

    A replica that fails is out of service until it has pulled the current weights again. While no replica serves,
    requests wait for one. A router belongs to one event loop.

    Example: a router over two replicas, new weights, and a pause that loses nothing:

        router = GeneratorRouter([replica_0, replica_1], StickySession(fallback=LeastLoaded()))
        completion = await router.generate([1, 2, 3], request_id="g0/0/0", sampling=SamplingParams(max_tokens=64))
        await router.pull_state_dict(1)
        await router.pause("keep")
        await router.resume()
        await router.close()

    Args:
        replicas: Replicas to begin with.
        strategy: Routing strategy, which must not be shared with another router. By default
            `StickySession(fallback=LeastLoaded())`.
        stall_timeout_s: Seconds without a sign of life after which a replica that has requests has failed; its requests
            continue on others. Waiting in a queue that moves is not a failure, and time frozen by `pause("keep")` does
            not count.
        max_attempts: Number of failed attempts after which a request fails.
        limits: Time limits.
        on_replica_failed: Called once for each quarantine, so that a supervisor can restart the replica.
        least_replicas: Number of replicas that must be in service; with fewer, requests wait.
        move_below: Share of the fullest replica's requests. Replicas with at most this share receive some of its
            requests; see `Moves`. None moves no requests.

    Raises:
        ValueError: the strategy belongs to another router, two replicas have the same name, or a number is out of
            range.
    """

    _pool_type: type[Pool] = Pool

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
        limits = limits or Limits()
        self._on_replica_failed = on_replica_failed
        self._stall_timeout_s = stall_timeout_s
        self._dedicated: Dedication | None = None
        self._num_dedications = 0
        self._calls = OpenCalls()
        tasks = BackgroundTasks(self._calls)
        strategy = strategy or StickySession(fallback=LeastLoaded())
        pool = self._pool = self._pool_type(replicas, strategy, limits, tasks, on_replica_failed, least_replicas)
        requests = self._requests = RequestsInFlight(pool, stall_timeout_s)
        shards = self._shards = Shards(pool)
        pause = self._pause = Pause(pool, requests, shards)
        self._puller = Puller(pool, requests, shards)
        self._dispatcher = Dispatcher(
            pool, requests, pause, self._calls, max_attempts=max_attempts, move_below=move_below
        )

    @property
    def replicas(self) -> tuple[ReplicaStatus, ...]:
        """Status of every replica for metrics: load, version and health. The load includes that of the shards."""
        by_name = dict[str, PooledReplica]()
        for router in self._routers:
            for replica in router._pool:
                by_name.setdefault(replica.name, replica)
        return tuple(map(ReplicaStatus.of, by_name.values()))

    def has_replica(self, name: str) -> bool:
        """Whether the router has a replica of that name."""
        return any(name in router._pool for router in self._routers)

    @property
    def _routers(self) -> tuple[GeneratorRouter, ...]:
        """This router, and that of the dedicated replica."""
        return (self,) if self._dedicated is None else (self, self._dedicated.router)

    @property
    def version(self) -> int | None:
        """Target version of all replicas: the newest requested one, except versions that no replica could load. None
        before the first pull."""
        return self._pool.target.version

    def note_pull_elsewhere(self, name: str) -> None:
        """Note that a replica has ended a pull for another router, behind which the requests and the pull of this
        router may wait: their time limits begin again. Does nothing if there is no replica of that name."""
        if name in self._pool:
            self._pool.find(name).note_pull_elsewhere(self._pool.limits.pull_s)

    @property
    def last_seen_at(self) -> float | None:
        """Time of the last sign of life of any replica that runs requests, by the event loop's clock; None if no
        replica does."""
        return self._requests.stalls.last_seen_at

    def trouble(self) -> str | None:
        """Explain why no request can be answered at present; None while enough replicas serve, paused or not."""
        return self._pool.trouble() if self._calls.ended is None else "it is closed"

    @property
    def paused(self) -> PauseMode | None:
        """The mode of the present pause."""
        return self._pool.target.mode

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        *,
        request_id: str,
        session_id: str | None = None,
        sampling: SamplingParams,
    ) -> Completion:
        """Return the completion of a prompt. After an abort, or at the end of the rollout's time, it has the tokens so
        far and `FinishReason.ABORT`.

        Raises:
            RequestError: the request can never succeed, its id is in flight, or several replicas that serve others
                failed it in the same way.
            NoReplicaError: too few replicas came into service within the limit; the last failure is the cause.
            GenerationError: the request failed on `max_attempts` replicas, or waited too long for a resume.
            EngineDeadError: the router is closed.
        """
        return await self.stream(EngineRequest(request_id, prompt_token_ids, sampling, session_id), listener())

    def stream(self, request: EngineRequest, on_chunk: OnChunk | None = None) -> Coroutine[Any, Any, Completion]:
        """Answer a request like `generate`, and pass on its tokens as early as the replicas stream them.

        Args:
            on_chunk: Receives each token of the completion once and in order, in the event loop. It must not raise: the
                error would count as a failure of the replica.
        """
        if request.version is not None and self._dedicated is not None:
            return self._dedicated.router.stream(replace(request, version=None), on_chunk)
        return self._dispatcher.generate(request, on_chunk)

    def pin(self, version: int | None) -> None:
        """Make replicas that start load this version before the newest one, because requests name it. None ends that.

        The replicas in service must already have the version, and their engines must pin versions.
        """
        self._pool.target.pinned = version

    async def dedicate_replica(self, version: int) -> bool:
        """Dedicate one replica to the requests that name a version, and keep it at that version, until
        `release_replica`. The other replicas continue, and requests that run on the dedicated replica finish there:
        await `wait_dedicated` before the next pull. Shards also send requests to it.

        If the replica is removed, the next replica that is added takes its place; it has to pull the same version.

        Returns:
            Whether a replica is dedicated now. False, without effect, if too few replicas would be left, none has the
            version, or one is dedicated already.
        """
        serving = [replica for replica in self._pool if replica.serving]
        able = [replica for replica in serving if replica.version == version]
        if self._dedicated is not None or not able or len(serving) - 1 < max(1, self._pool.least):
            return False
        replica = min(able, key=lambda replica: replica.load)
        self._pool.withdraw(replica, Service.DRAINING)
        router = GeneratorRouter(
            [replica.handle],
            stall_timeout_s=self._stall_timeout_s,
            limits=self._pool.limits,
            on_replica_failed=self._on_replica_failed,
        )
        router._pool.target.version = router._pool.target.loaded = version
        router._pool.find(replica.name).version = version
        self._num_dedications += 1
        self._dedicated = Dedication(self._num_dedications, router)
        await asyncio.gather(*(self._share_dedicated(link) for link in self._shards.links))
        return True

    async def _share_dedicated(self, link: ShardLink) -> None:
        """Make a shard send requests that name a version to the dedicated replica."""
        if (dedicated := self._dedicated) is not None:
            own_link = dedicated.links[link] = DedicatedLink(link, dedicated.number)
            with suppress(ActorDiedError, EngineDeadError):  # the shard or the dedication has ended
                await dedicated.router.join(own_link)

    async def wait_dedicated(self) -> None:
        """Wait until the dedicated replica runs only requests that name its version. After `Limits.drain_s`, the others
        continue on other replicas."""
        if (dedicated := self._dedicated) is None:
            return
        for replica in self._pool:
            if dedicated.router.has_replica(replica.name):
                await self._until_idle(replica, self._pool.limits.drain_s)
                if self._dedicated is dedicated and not replica.removed:
                    self._remove(replica.name)

    async def release_replica(self) -> None:
        """End `dedicate_replica`: the replica pulls the newest version and serves like the others. Does nothing if no
        replica is dedicated."""
        dedicated, self._dedicated = self._dedicated, None
        if dedicated is None:
            return
        handles = [replica.handle for replica in dedicated.router._pool]
        for handle in handles:
            dedicated.router.remove_replica(handle.name)
        dedicated.links.clear()
        await dedicated.router.close()
        await self._shards.end_dedication(dedicated.number)
        try:
            for handle in handles:
                if handle.name not in self._pool:
                    await self.add_replica(handle)
                elif (replica := self._pool.find(handle.name)).service is Service.DRAINING:
                    await self._bring_up(replica)
        finally:
            dedicated.ended.set()

    async def pull_state_dict(self, version: int, mode: PullMode = "hot_swap") -> PullReport:
        """Bring every replica to `version`, or to a newer version that was requested in the meantime.

        "hot_swap" pulls while requests run. "drain" takes one replica at a time out of service and lets its requests
        finish first. A replica that cannot pull stays out of service until it can, and the others continue.

        Raises:
            UnavailableWeightsError: no replica could get the version. The loaded version is still served.
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
        Returns within the limits even if replicas do not respond; the report names the requests and replicas that
        exceeded them.

        Raises:
            RuntimeError: the router is paused already.
            ValueError: there is no such mode.
        """
        async with self._calls.one():
            return await self._pause.pause(PauseMode(mode))

    async def resume(self) -> None:
        """End a pause. Frozen requests continue from their present state.

        Raises:
            RuntimeError: the router is not paused.
        """
        async with self._calls.one():
            await self._pause.resume()

    async def wait_resumed(self) -> None:
        """Return when the router is not paused.

        Raises:
            GenerationError: the router was not resumed within the limit.
        """
        async with self._calls.one():
            await self._pause.wait_open()

    async def abort(self, request_ids: Iterable[str] | None = None) -> tuple[str, ...]:
        """End requests with the tokens they have, by default all that are in flight. Later requests are not affected.

        Returns:
            Ids of requests that did not return in time and were cancelled. Unknown ids are ignored.
        """
        async with self._calls.one():
            ids = None if request_ids is None else tuple(request_ids)
            requests = list(self._requests) if ids is None else self._requests.find(ids)
            cancelled, ended = await asyncio.gather(self._requests.abort(requests), self._shards.abort(ids))
            return (*cancelled, *ended.cancelled)

    def tokens_so_far(self) -> dict[str, Completion]:
        """Tokens streamed so far for each request in flight, by id, as aborted completions."""
        return {request.request_id: request.partial.so_far for request in self._requests}

    @property
    def num_tokens_so_far(self) -> int:
        """Number of tokens of all requests in flight, also in shards, without building `tokens_so_far`."""
        own = sum(request.partial.num_tokens for router in self._routers for request in router._requests)
        return own + sum(router._shards.num_tokens for router in self._routers)

    @property
    def num_in_flight(self) -> int:
        """Number of requests in flight, also in shards and on a dedicated replica."""
        return sum(len(router._requests) + router._shards.num_requests for router in self._routers)

    @property
    def num_answered(self) -> int:
        """Number of requests answered so far, also in shards, except by replicas that were dedicated before."""
        return sum(router._requests.num_answered + router._shards.num_answered for router in self._routers)

    def take_most_in_flight(self) -> int:
        """Largest number of requests in flight since the last call."""
        return sum(router._requests.take_most() + router._shards.take_most_requests() for router in self._routers)

    @property
    def num_moved(self) -> int | None:
        """Number of requests so far that moved to an emptier replica, also in shards. None without `move_below`."""
        own = self._dispatcher.moves.num_moved
        return None if own is None else own + self._shards.num_moved

    def finish_session(self, session_id: str) -> None:
        """Free the strategy's state of a session, which sends no further requests."""
        self._pool.strategy.finish_session(session_id)

    async def add_replica(self, replica: Replica) -> bool:
        """Add a replica, which joins once it has the current version and pause mode.

        Returns:
            Whether the replica serves. A replica that failed is in quarantine and is tried again.

        Raises:
            ValueError: the name of the replica is taken.
        """
        if self._dedicated is not None and not self._dedicated.router.replicas:
            return await self._dedicated.router.add_replica(replica)
        async with self._calls.one():
            pooled = self._pool.add(replica)
            try:
                await self._bring_up(pooled)
            except asyncio.CancelledError:
                if not pooled.removed:  # `close` may have removed it
                    self._pool.remove(pooled.name)
                raise
            await self._shards.settle()
            return pooled.serving

    async def _bring_up(self, replica: PooledReplica) -> None:
        try:
            await self._pool.bring_up(replica)
        except Exception as error:
            self._pool.quarantine(replica, error)

    def remove_replica(self, name: str) -> None:
        """Remove a replica without closing it. Its requests continue on other replicas from their streamed tokens.

        Raises:
            ValueError: there is no replica of that name.
        """
        dedicated = self._dedicated
        if dedicated is not None and dedicated.router.has_replica(name):
            dedicated.router.remove_replica(name)
            if name not in self._pool:
                return
        self._remove(name)

    def _remove(self, name: str) -> None:
        replica = self._pool.remove(name)
        for request in self._requests.on(replica):
            request.end(CutShortError())

    async def retire_replica(self, name: str, finish_s: float) -> None:
        """Stop sending requests to a replica, and remove it when it is idle or after `finish_s` seconds.

        Raises:
            ValueError: there is no replica of that name.
        """
        if self._dedicated is not None and self._dedicated.router.has_replica(name):
            with suppress(TimeoutError):  # the replica first finishes the requests for its version
                async with asyncio.timeout(finish_s):
                    await self._dedicated.ended.wait()
        if name not in self._pool and self.has_replica(name):
            self.remove_replica(name)
            return
        replica = self._pool.find(name)
        self._pool.withdraw(replica, Service.DRAINING)
        await self._until_idle(replica, finish_s)
        if not replica.removed:
            self.remove_replica(name)

    async def _until_idle(self, replica: PooledReplica, seconds: float) -> None:
        """Wait for at most `seconds` until a replica out of service runs no request of this router or a shard."""
        own = self._requests.wait_idle(replica, seconds)
        results = await asyncio.gather(own, self._shards.drain(replica, seconds, abort=False), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, TimeoutError):
                raise result

    async def join(self, link: ShardLink) -> None:
        """Add a shard: a `RouterShard` behind `link`, usually in another process. It may send requests to the replicas
        once this returns, and pulls, pauses, drains and aborts of this router apply to its requests, too.

        Raises:
            ConfigError: a replica cannot be reached from other processes.
            ActorDiedError: the shard has ended.
        """
        async with self._calls.one(), self._pause.changing:
            await self._shards.join(link, self.paused)
            await self._share_dedicated(link)

    def leave(self, link: ShardLink) -> None:
        """Forget a shard that has ended."""
        self._shards.leave(link)
        if self._dedicated is not None and (own_link := self._dedicated.links.pop(link, None)) is not None:
            self._dedicated.router.leave(own_link)

    def receive(self, link: ShardLink, report: FromShard) -> None:
        """Handle a report of a shard."""
        dedicated = self._dedicated
        if isinstance(report, ReplicaFailed):
            self._shards.receive(link, report)
        elif dedicated is not None and report.dedication == dedicated.number and link in dedicated.links:
            dedicated.router.receive(dedicated.links[link], report.failed)

    async def close(self) -> None:
        """Fail all calls in flight with `EngineDeadError` and close every replica. Closing again does nothing."""
        if self._dedicated is not None:
            await self._dedicated.router.close()
        self._calls.end(EngineDeadError("the router is closed"))
        self._dispatcher.moves.close()
        limits = self._pool.limits
        if running := [request.done for request in self._requests]:
            await asyncio.wait(running, timeout=limits.cancel_s)
        await self._pool.tasks.close(limits.cancel_s)
        await self._pool.close()

"""Shard of a router: dispatches its own requests to replicas that another router controls, over streams that it reopens
until the router removes the replica."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from titan_rl.core.calls.retries import Backoff
from titan_rl.core.calls.user_code import summary
from titan_rl.core.errors import GenerationError, TitanRLError
from titan_rl.generation.request import EngineRequest, OnChunk
from titan_rl.generation.router.pool import Pool, PooledReplica, Service
from titan_rl.generation.router.replica import Limits, Replica
from titan_rl.generation.router.router import Dedication, GeneratorRouter
from titan_rl.generation.router.shard_control import (
    AbortRequests,
    DedicatedFailed,
    Drain,
    EndDedication,
    Ended,
    ForDedicated,
    FromShard,
    PauseShard,
    ReplicaFailed,
    ReplicaState,
    ResumeShard,
    ShardLoad,
    TellLoad,
    ToShard,
    Totals,
    Update,
)
from titan_rl.generation.router.strategies import Strategy
from titan_rl.generation.types import PauseMode
from titan_rl.types import Completion

logger = logging.getLogger(__name__)


class ShardReplica:
    """Base class of a shard's replicas. The router pulls, pauses and resumes the engine; a subclass adds `stream` or
    `generate`, `abort`, and `close`, which only ends the shard's own connection.

    Attributes:
        identity: Number by which the router identifies the replica.
        admitted: Epoch of the replica in the router at its last admission.
        wanted: Whether the router has the replica in service, and it has not failed in this shard since.
    """

    is_open = True
    """Whether requests can be sent. In the shard, a replica that is not open is out of service."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.identity = -1
        self.admitted = 0
        self.wanted = False

    def begin(self, listener: ConnectionListener) -> None:
        """Start connecting, and report changes to the listener. A replica that is always open does nothing."""

    async def pull(self, version: int) -> int:
        return version

    async def pause(self, mode: PauseMode) -> None: ...

    async def resume(self) -> None: ...


class ConnectionListener(Protocol):
    """Receiver of the changes of a connection. A change is reported before any request of the connection fails."""

    def connection_changed(self, replica: ShardReplica) -> None:
        """The connection has opened, or its stream has broken and is opened again; see `ShardReplica.is_open`."""
        ...

    def connection_unreachable(self, replica: ShardReplica, error: GenerationError) -> None:
        """Several attempts in a row have failed. Further attempts follow. Reported once until the connection is open
        again."""
        ...


class ReplicaStream(Protocol):
    """One stream of requests and tokens between a shard and a replica. A broken stream stays broken."""

    @property
    def broken(self) -> str | None:
        """Reason why the stream is broken; None while it works."""
        ...

    async def generate(self, request: EngineRequest, on_chunk: OnChunk) -> Completion:
        """Answer a request; see `StreamingReplica.stream`.

        Raises:
            GenerationError: the stream has broken, or the request failed.
        """
        ...

    async def abort(self, request_ids: Sequence[str]) -> None: ...

    async def wait_broken(self) -> None:
        """Return once the stream has broken."""
        ...

    def close(self) -> None:
        """Break the stream unless it is broken already."""
        ...


class StreamOpener(Protocol):
    """Opens streams to one replica."""

    async def open(self) -> ReplicaStream:
        """Open a stream. The replica ends the requests of earlier streams, whose answers nobody receives.

        Raises:
            Exception: the replica cannot be reached at present.
        """
        ...


@dataclass(frozen=True, slots=True)
class Retries:
    """Limits of the attempts at a connection.

    Attributes:
        open_s: Time limit of one attempt.
        first_s, longest_s: First and longest pause between two attempts.
        reported_after: Number of failures in a row after which the replica counts as unreachable. A stream that breaks
            before its first answer counts as a failure, too.
    """

    open_s: float = 10.0
    first_s: float = 0.25
    longest_s: float = 5.0
    reported_after: int = 5


class ReplicaConnection(ShardReplica):
    """A `ShardReplica` that opens a new stream whenever the last one has broken.

    Requests that are in flight when a stream breaks fail with `GenerationError`, so that the shard continues them from
    their tokens so far on another replica. The replica itself ends them when the next stream is opened. The listener
    takes the replica out of the shard's service before they fail, so that the break counts as a failed attempt of the
    requests, and not as a failure of the replica.
    """

    def __init__(self, name: str, opener: StreamOpener, retries: Retries | None = None) -> None:
        super().__init__(name)
        self._opener = opener
        self._retries = retries or Retries()
        self._backoff = self._first_pause()
        self._failures = 0  # number of failures in a row
        self._stream: ReplicaStream | None = None  # None while there is no connection
        self._why = "it connects for the first time"  # reason why there is no connection
        self._listener: ConnectionListener
        self._running: asyncio.Task[None] | None = None

    @property
    def is_open(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._stream is not None

    def begin(self, listener: ConnectionListener) -> None:
        self._listener = listener
        self._running = asyncio.ensure_future(self._keep_open())

    async def stream(self, request: EngineRequest, on_chunk: OnChunk) -> Completion:
        stream = self._opened()
        try:
            completion = await stream.generate(request, on_chunk)
        except GenerationError:
            if stream.broken is not None:
                self._lose(stream)
            raise
        if self._stream is stream:
            self._failures = 0
            self._backoff = self._first_pause()
        return completion

    async def abort(self, request_ids: Sequence[str]) -> None:
        await self._opened().abort(request_ids)

    async def close(self) -> None:
        self._why = "it is closed"
        if self._running is not None:
            self._running.cancel()
        if (stream := self._stream) is not None:
            self._stream = None
            stream.close()

    def _opened(self) -> ReplicaStream:
        if self._stream is None:
            raise GenerationError(f"there is no connection to {self.name}: {self._why}")
        return self._stream

    async def _keep_open(self) -> None:
        while True:
            try:
                async with asyncio.timeout(self._retries.open_s):
                    stream = await self._opener.open()
            except Exception as error:
                late = isinstance(error, TimeoutError)
                self._fail(f"no answer within {self._retries.open_s:g} s" if late else summary(error))
            else:
                self._stream = stream
                self._listener.connection_changed(self)
                await stream.wait_broken()
                self._lose(stream)
            await self._backoff.pause()

    def _lose(self, stream: ReplicaStream) -> None:
        """Note that a stream has broken. Further calls do nothing."""
        if self._stream is not stream:
            return
        self._stream = None
        self._listener.connection_changed(self)
        self._fail(stream.broken or "its stream has ended")
        stream.close()

    def _fail(self, why: str) -> None:
        self._why = why
        self._failures += 1
        most = self._retries.reported_after
        level = logging.WARNING if self._failures <= most else logging.DEBUG
        logger.log(level, "the connection to replica %s failed (%d in a row): %s", self.name, self._failures, why)
        if self._failures == most:
            error = GenerationError(f"{self.name} cannot be reached: {most} attempts in a row failed; the last: {why}")
            self._listener.connection_unreachable(self, error)

    def _first_pause(self) -> Backoff:
        return Backoff(self._retries.first_s, self._retries.longest_s)


class ShardPool(Pool):
    """Pool whose replicas are in service while the router has them in service and the connection to them is open. A
    replica that fails in the shard is out of service in the shard until the router has admitted it again.

    A replica whose connection is being reopened counts as draining: it comes back, and `least_replicas` applies to the
    replicas that the router has in service.
    """

    def take_out(self, replica: PooledReplica) -> None:
        self.withdraw(replica)

    def quarantine(self, replica: PooledReplica, error: Exception, epoch: int | None = None) -> None:
        if replica.serving or (replica.healthy and _handle_of(replica).is_open):
            self._report(replica, error, epoch)

    def follow(self, replica: PooledReplica, state: ReplicaState) -> None:
        """Bring a replica to the state that the router has decided."""
        handle = _handle_of(replica)
        replica.version = state.version
        if state.service is not Service.SERVING:
            handle.wanted = False
            self.withdraw(replica, state.service)
        elif state.epoch > handle.admitted:
            handle.admitted, handle.wanted = state.epoch, True
            self.withdraw(replica)  # admitted again below, in a new epoch, so that earlier failures are ignored
            self.connection_changed(replica)

    def connection_changed(self, replica: PooledReplica) -> None:
        """Admit a replica that the router has in service if the connection to it is open, and withdraw it otherwise."""
        handle = _handle_of(replica)
        if not handle.wanted:
            return
        if handle.is_open:
            self.aborts.send_again(replica)
            self.admit(replica)
        else:
            self.withdraw(replica, Service.DRAINING)

    def unreachable(self, replica: PooledReplica, error: GenerationError) -> None:
        """Report a replica that the shard cannot reach, if the router has it in service."""
        if _handle_of(replica).wanted:
            self._report(replica, error)

    def _report(self, replica: PooledReplica, error: Exception, epoch: int | None = None) -> None:
        if epoch is None or epoch == replica.epoch:
            _handle_of(replica).wanted = False
        super().quarantine(replica, error, epoch)


def _handle_of(replica: PooledReplica) -> ShardReplica:
    assert isinstance(replica.handle, ShardReplica)
    return replica.handle


class RouterShard(GeneratorRouter):
    """Router of one process's requests over the replicas of another process's router.

    It has the strategy, the failover, the moves and the stall detection of a router. `receive_message` carries out the
    router's decisions.

    Args:
        connect: Makes the replica for a name and an address.
        report: Sends a report to the router.
        strategy: Routing strategy of the shard; see `GeneratorRouter`.
        origin: Suffix of engine ids, unique among all shards that the replicas have ever had.
        limits: Time limits.
        options: Further arguments of `GeneratorRouter`.
    """

    _pool_type = ShardPool

    def __init__(
        self,
        connect: Callable[[str, Any], ShardReplica],
        report: Callable[[FromShard], None],
        strategy: Strategy | None = None,
        *,
        origin: str,
        limits: Limits | None = None,
        **options: Any,
    ) -> None:
        super().__init__((), strategy, limits=limits, on_replica_failed=self._failed, **options)
        self._connect = connect
        self._report = report
        self._next = 0
        self._reported = ShardLoad()
        self._least_dedication = 0  # messages of earlier dedications arrive too late
        self._turns: dict[int, asyncio.Event] = {}  # set when the turn of a message that arrived early has come
        self._is_closed = False
        self._pool.origin = origin

    async def receive_message(self, number: int, message: ToShard) -> Ended:
        """Carry out a message of the router, after the messages sent before it have been started. A closed shard
        carries out none.

        Args:
            number: Number of the message, counted from 0.
            message: The message.
        """
        if isinstance(message, ForDedicated):
            return await self._receive_for_dedicated(message)
        if number != self._next and not self._is_closed:
            turn = self._turns[number] = asyncio.Event()
            await turn.wait()
        if self._is_closed:
            return Ended()
        task = asyncio.ensure_future(self._carry_out(message))
        await asyncio.sleep(0)  # lets the task begin
        self._next = number + 1
        if (turn := self._turns.pop(self._next, None)) is not None:
            turn.set()
        return await task

    async def close(self) -> None:
        self._is_closed = True
        for turn in self._turns.values():  # of messages whose predecessors come too late
            turn.set()
        await super().close()

    async def _carry_out(self, message: ToShard) -> Ended:
        match message:
            case Update():
                self._follow(message.replicas)
            case Totals():
                self._note(message)
            case TellLoad():
                return Ended(load=self._load())
            case PauseShard():
                if self.paused is None:
                    report = await self.pause(message.mode)
                    return Ended(report.aborted, report.cancelled)
            case ResumeShard():
                if self.paused is not None:
                    await self.resume()
            case Drain():
                return await self._drain(message)
            case AbortRequests(request_ids):
                return Ended(cancelled=await self.abort(request_ids))
            case EndDedication(dedication):
                await self._end_dedication(dedication)
            case ForDedicated():
                return await self._receive_for_dedicated(message)
        return Ended()

    async def _receive_for_dedicated(self, message: ForDedicated) -> Ended:
        """Carry out a message of the router of a dedicated replica, in a shard of that router."""
        if (before := self._dedicated) is not None and before.number < message.dedication:
            await self._end_dedication(before.number)
        if message.dedication < self._least_dedication:
            return Ended()
        self._least_dedication = message.dedication
        if self._dedicated is None:
            shard = RouterShard(
                self._connect,
                self._report_dedicated,
                origin=f"{self._pool.origin}.{message.dedication}",
                limits=self._pool.limits,
                stall_timeout_s=self._stall_timeout_s,
            )
            self._dedicated = Dedication(message.dedication, shard)
        shard = self._dedicated.router
        assert isinstance(shard, RouterShard)
        return await shard.receive_message(message.number, message.message)

    async def _end_dedication(self, dedication: int) -> None:
        self._least_dedication = max(self._least_dedication, dedication + 1)
        if (ended := self._dedicated) is not None and ended.number == dedication:
            self._dedicated = None
            await ended.router.close()

    def _report_dedicated(self, report: FromShard) -> None:
        assert isinstance(report, ReplicaFailed)
        self._report(DedicatedFailed(self._least_dedication, report))

    @property
    def _shard_pool(self) -> ShardPool:
        assert isinstance(self._pool, ShardPool)
        return self._pool

    def _follow(self, states: tuple[ReplicaState, ...]) -> None:
        pool = self._shard_pool
        for state in states:
            is_known = state.name in pool and _handle_of(pool.find(state.name)).identity == state.identity
            if state.service is Service.REMOVED:
                if is_known:
                    self._disconnect(state.name)
                continue
            if state.address is not None and not is_known:
                if state.name in pool:
                    self._disconnect(state.name)
                handle: Any = self._connect(state.name, state.address)
                handle.identity = state.identity
                pool.add(handle)
                handle.begin(self)
            pool.follow(pool.find(state.name), state)

    def connection_changed(self, replica: ShardReplica) -> None:
        if (pooled := self._pooled(replica)) is not None:
            self._shard_pool.connection_changed(pooled)

    def connection_unreachable(self, replica: ShardReplica, error: GenerationError) -> None:
        if (pooled := self._pooled(replica)) is not None:
            self._shard_pool.unreachable(pooled, error)

    def _pooled(self, handle: ShardReplica) -> PooledReplica | None:
        """The replica of a connection; None if it has been removed."""
        pooled = self._pool.find(handle.name) if handle.name in self._pool else None
        return pooled if pooled is not None and _handle_of(pooled) is handle else None

    def _disconnect(self, name: str) -> None:
        """Continue the requests of a removed replica on other replicas, and close the connection to it."""
        handle = self._pool.find(name).handle
        self._remove(name)
        self._pool.tasks.start(handle.close(), f"close the connection to {name}")

    def _note(self, totals: Totals) -> None:
        own_slice = totals.own_slice(replica.name for replica in self._pool if replica.serving)
        for replica in self._pool:
            tokens, requests = totals.loads.get(replica.name, (0, 0))
            own_tokens, own_requests = self._reported.loads.get(replica.name, (0, 0))
            in_other_shards = max(0, tokens - own_tokens), max(0, requests - own_requests)
            away = replica.serving and replica.name not in own_slice
            self._pool.note_other_shards(replica, in_other_shards, away=away)
            if replica.name in totals.versions and _handle_of(replica).wanted:
                replica.version = totals.versions[replica.name]

    async def _drain(self, message: Drain) -> Ended:
        if message.name not in self._pool:
            return Ended()
        replica = self._pool.find(message.name)
        if message.abort:
            return Ended(aborted=await self._requests.drain(replica, message.seconds))
        with suppress(TimeoutError):
            await self._requests.wait_idle(replica, message.seconds)
        return Ended()

    def _failed(self, handle: Replica, error: Exception) -> None:
        assert isinstance(handle, ShardReplica)
        sendable = error if isinstance(error, TitanRLError) else GenerationError(summary(error))
        self._report(ReplicaFailed(handle.name, handle.identity, handle.admitted, sendable))

    def _load(self) -> ShardLoad:
        loads = {
            replica.name: (replica.load - replica.load_of_others, replica.num_requests)
            for replica in self._pool
            if replica.num_requests
        }
        tokens = sum(request.partial.num_tokens for request in self._requests)
        requests = self._requests
        most = requests.take_most()
        self._reported = ShardLoad(loads, tokens, self.num_moved, len(requests), most, requests.num_answered)
        return self._reported

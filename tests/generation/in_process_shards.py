"""Router with shards in one process, with the interface of a single router. Messages between the router and its shards
take a random time, and arrive in any order."""

from __future__ import annotations

import asyncio
import random
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

from titan_rl.core.errors import ActorDiedError, GenerationError
from titan_rl.generation.request import EngineRequest, OnChunk
from titan_rl.generation.router import GeneratorRouter
from titan_rl.generation.router.replica import Replica, StreamingReplica
from titan_rl.generation.router.shard import ReplicaConnection, RouterShard, ShardReplica
from titan_rl.generation.router.shard_control import Ended, FromShard, ToShard
from titan_rl.types import Completion, TokenChunk

LATENCY_S = 0.05  # maximum latency of a message


class Connected(ShardReplica):
    """Connection of a shard to a replica of the test."""

    def __init__(self, name: str, replica: Any) -> None:
        super().__init__(name)
        self._replica = replica

    async def generate(self, *args: Any, **kwargs: Any) -> Completion:
        return await self._replica.generate(*args, **kwargs)

    async def abort(self, request_ids: Sequence[str]) -> None:
        await self._replica.abort(request_ids)

    async def close(self) -> None: ...


class ConnectedStream(Connected):
    async def stream(self, request: EngineRequest, on_chunk: OnChunk) -> Completion:
        return await self._replica.stream(request, on_chunk)


class Addressed:
    """Replica that is its own address."""

    def __init__(self, replica: Any) -> None:
        self.address = replica
        self._replica = replica

    def __getattr__(self, name: str) -> Any:
        return getattr(self._replica, name)

    def forget(self, shard: str) -> None:
        """Do nothing: a shard that ends here closes its requests itself."""


def _connect(name: str, replica: Any) -> Connected:
    return ConnectedStream(name, replica) if isinstance(replica, StreamingReplica) else Connected(name, replica)


class Network:
    """Streams between the shards and replicas of a test. When a shard opens a new stream, the replica ends the requests
    of the broken one.

    Attributes:
        refused: Pairs of a shard and a replica whose streams cannot be opened.
        num_opened: Number of streams opened so far, by pair.
    """

    def __init__(self) -> None:
        self.refused: set[tuple[str, str]] = set()
        self.num_opened = Counter[tuple[str, str]]()
        self.random = random.Random(0)
        self._streams: dict[tuple[str, str], InProcessStream] = {}

    def connect_of(self, shard: str) -> Callable[[str, Any], ReplicaConnection]:
        return lambda name, replica: ReplicaConnection(name, _Opener(self, (shard, name), replica))

    def cut(self, replica: str, shard: str | None = None) -> None:
        """Break the streams of all shards, or of one, to a replica."""
        for (end, name), stream in self._streams.items():
            if name == replica and shard in (None, end):
                stream.break_off("cut")

    async def open(self, pair: tuple[str, str], replica: Any) -> InProcessStream:
        await asyncio.sleep(self.random.uniform(0, LATENCY_S))
        if pair in self.refused:
            raise ConnectionError("refused")
        if pair in self._streams:
            await self._streams[pair].end_requests()
        stream = self._streams[pair] = InProcessStream(replica)
        self.num_opened[pair] += 1
        return stream


class _Opener:
    def __init__(self, network: Network, pair: tuple[str, str], replica: Any) -> None:
        self._network, self._pair, self._replica = network, pair, replica

    async def open(self) -> InProcessStream:
        return await self._network.open(self._pair, self._replica)


class InProcessStream:
    """A `ReplicaStream` to a replica of the test."""

    def __init__(self, replica: Any) -> None:
        self.broken: str | None = None
        self._replica = replica
        self._broken = asyncio.Event()
        self._requests: set[asyncio.Task[Completion]] = set()

    async def generate(self, request: EngineRequest, on_chunk: OnChunk) -> Completion:
        if self.broken is not None:
            raise GenerationError(self.broken)
        streams = isinstance(self._replica, StreamingReplica)

        def forward(chunk: TokenChunk) -> None:
            if self.broken is None:
                on_chunk(chunk)

        answering = asyncio.ensure_future(
            self._replica.stream(request, forward) if streams else request.sent_to(self._replica.generate)
        )
        self._requests.add(answering)
        ending = asyncio.ensure_future(self._broken.wait())
        try:
            await asyncio.wait([answering, ending], return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:  # the router aborts the request
            answering.cancel()
            raise
        finally:
            ending.cancel()
        if self.broken is not None:  # the replica continues the request
            raise GenerationError(self.broken)
        self._requests.discard(answering)
        return await answering

    async def abort(self, request_ids: Sequence[str]) -> None:
        await self._replica.abort(request_ids)

    async def wait_broken(self) -> None:
        await self._broken.wait()

    def close(self) -> None:
        self.break_off("closed")

    def break_off(self, why: str) -> None:
        if self.broken is None:
            self.broken = why
            self._broken.set()

    async def end_requests(self) -> None:
        self.break_off("replaced")
        for request in self._requests:
            request.cancel()
        await asyncio.gather(*self._requests, return_exceptions=True)


class InProcessLink:
    """A shard, and the router's connection to it."""

    def __init__(
        self, name: str, router: GeneratorRouter, options: dict[str, Any], network: Network | None = None
    ) -> None:
        self.name = name
        self.random = random.Random(name)
        self.died = asyncio.Event()
        connect = _connect if network is None else network.connect_of(name)
        self.shard = RouterShard(connect, self._report, origin=f"@{name}", **options)
        self._router = router

    async def call(self, number: int, message: ToShard) -> Ended:
        await asyncio.sleep(self.random.uniform(0, LATENCY_S))
        carrying = asyncio.ensure_future(self.shard.receive_message(number, message))
        ending = asyncio.ensure_future(self.died.wait())
        await asyncio.wait([carrying, ending], return_when=asyncio.FIRST_COMPLETED)
        ending.cancel()
        if not carrying.done() or self.died.is_set():
            carrying.cancel()
            raise ActorDiedError(f"{self.name} died")
        return await carrying

    def end(self, reason: str) -> None:
        self.died.set()

    def _report(self, report: FromShard) -> None:
        if not self.died.is_set():
            delay_s = self.random.uniform(0, LATENCY_S)
            asyncio.get_running_loop().call_later(delay_s, self._router.receive, self, report)

    async def kill(self) -> None:
        """End the shard and its requests, like the death of its process."""
        self.died.set()
        self._router.leave(self)
        await self.shard.close()


class InProcessShards:
    """Router and its shards. Sessions stay in their shard.

    Args:
        network: Network between shards and replicas. By default they are connected directly.
    """

    def __init__(
        self, replicas: Iterable[Replica], *args: Any, num_shards: int, network: Network | None = None, **options: Any
    ) -> None:
        self.router = GeneratorRouter(map(Addressed, replicas), *args, **options)  # pyright: ignore
        options.pop("on_replica_failed", None)
        self.links = [InProcessLink(f"shard{number}", self.router, options, network) for number in range(num_shards)]
        self._joined: asyncio.Future[Any] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.router, name)

    async def joined(self) -> None:
        """Wait until all shards have joined. Earlier calls of the router wait for this, too."""
        if self._joined is None:
            self._joined = asyncio.gather(*(self.router.join(link) for link in self.links))
        await asyncio.shield(self._joined)

    def link_of(self, session_id: str | None) -> InProcessLink:
        living = [link for link in self.links if not link.died.is_set()]
        return living[zlib.crc32((session_id or "").encode()) % len(living)]

    async def generate(self, *args: Any, request_id: str, session_id: str | None = None, **kwargs: Any) -> Completion:
        await self.joined()
        shard = self.link_of(session_id or request_id).shard
        return await shard.generate(*args, request_id=request_id, session_id=session_id, **kwargs)

    async def stream(self, request: EngineRequest) -> Completion:
        await self.joined()
        return await self.link_of(request.session_id or request.request_id).shard.stream(request)

    async def add_replica(self, replica: Any) -> bool:
        return await self._after_join(self.router.add_replica, Addressed(replica))

    async def pull_state_dict(self, *args: Any) -> Any:
        return await self._after_join(self.router.pull_state_dict, *args)

    async def pause(self, *args: Any) -> Any:
        return await self._after_join(self.router.pause, *args)

    async def resume(self) -> None:
        await self._after_join(self.router.resume)

    async def abort(self, *args: Any) -> Any:
        return await self._after_join(self.router.abort, *args)

    async def close(self) -> None:
        await asyncio.gather(*(link.shard.close() for link in self.links))
        await self.router.close()

    async def _after_join(self, call: Callable[..., Awaitable[Any]], *args: Any) -> Any:
        await self.joined()
        return await call(*args)


def router_of(
    replicas: Iterable[Replica], *args: Any, num_shards: int = 0, network: Network | None = None, **options: Any
) -> Any:
    """Make a router. With `num_shards`, its shards send the requests."""
    if not num_shards:
        return GeneratorRouter(replicas, *args, **options)
    return InProcessShards(replicas, *args, num_shards=num_shards, network=network, **options)

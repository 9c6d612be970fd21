"""A generator actor as the router uses it, and the options of the router."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Any, Protocol

from titan_rl.cluster.processes.remote_process import RemoteProcess
from titan_rl.cluster.request_stream import CONTROLLER, RequestClient, call_generator
from titan_rl.config.sections import GenerationConfig, RoutingConfig, StateDictConfig
from titan_rl.generation.request import EngineRequest, OnChunk
from titan_rl.generation.router.replica import Limits
from titan_rl.generation.types import GaugeSummary, PauseMode
from titan_rl.types import Completion, TokenChunk
from titan_rl.weights.manifest import pack
from titan_rl.weights.types import PublishedWeights


class ActorReplica:
    """The `StreamingReplica` of one `GeneratorActor`.

    It finds manifests in `published` and records the measurements of each pull there. It serves requests between
    `connect` and `disconnect`.
    """

    def __init__(self, remote: RemoteProcess, actor: Any, published: PublishedWeights) -> None:
        self.name = remote.name
        self.remote = remote
        self._client = RequestClient(remote, actor, CONTROLLER)
        self._actor = actor
        self._published = published
        self._known_layouts: dict[str, frozenset[str]] = {}  # by adapter: digests of the layouts that the actor has
        self.gauges: GaugeSummary | None = None
        self._calls: Counter[str] = Counter()  # requests and pulls by adapter; final once the process has ended

    @property
    def at_work(self) -> frozenset[str]:
        """Adapters that have requests or pulls in flight, or had some when the process ended."""
        return frozenset(adapter for adapter, count in self._calls.items() if count)

    @contextlib.contextmanager
    def _working_for(self, adapter: str) -> Generator[None]:
        self._calls[adapter] += 1
        try:
            yield
        finally:
            if self.remote.reason is None:
                self._calls[adapter] -= 1

    @property
    def address(self) -> Any:
        """Handle of the actor, from which another process connects to it."""
        return self._actor

    def forget(self, process_id: str) -> None:
        """End the requests of another process, which has ended."""
        if self.remote.reason is None:
            self._actor.forget.broadcast(process_id)

    async def connect(self) -> None:
        """Have the actor send its completions to this replica."""
        await self._client.connect()

    def disconnect(self) -> None:
        """Stop receiving completions. Requests without a completion fail."""
        self._client.disconnect()

    async def stream(self, request: EngineRequest, on_chunk: OnChunk) -> Completion:
        with self._working_for(request.adapter):
            return await self._client.generate(request, on_chunk)

    async def pull(self, version: int) -> int:
        return await self.pull_adapter(version, self._published, "")

    async def pull_adapter(self, version: int, published: PublishedWeights, adapter: str) -> int:
        """Pull a version of one of several adapters.

        Args:
            published: Manifests of the adapter's versions. The pull's measurements are recorded there.
        """
        # After a failed pull it is unknown which layouts the actor has.
        packed = pack(published.manifest_of(version), self._known_layouts.pop(adapter, frozenset()))
        with self._working_for(adapter):
            loaded, figures, gauges = await call_generator(self.remote, self._actor.pull, packed, adapter)
        self._known_layouts[adapter] = frozenset(packed.digests)
        self.gauges = gauges or self.gauges
        if loaded == version:
            published.note_pull(self.name, figures)
        return loaded

    async def pause(self, mode: PauseMode) -> None:
        await call_generator(self.remote, self._actor.pause, mode)

    async def resume(self) -> None:
        await call_generator(self.remote, self._actor.resume)

    async def abort(self, request_ids: Sequence[str]) -> None:
        await call_generator(self.remote, self._actor.abort, list(request_ids))

    async def close(self) -> None:
        await call_generator(self.remote, self._actor.close)


class PullListener(Protocol):
    """Observer of the pulls of one adapter. An engine generates for no adapter during a pull."""

    def pulled(self, name: str) -> None:
        """Handle the end of a pull by the replica with this name, successful or not."""
        ...


class AdapterReplica:
    """Replica for the router of one of several adapters: a `StreamingReplica` over a shared `ActorReplica`.

    The requests of all adapters run in one engine, where their ids begin with the adapter's name.

    Attributes:
        shared: Replica of the generator. The routers of other adapters use it, too.
        adapter: Name of the adapter; "" is the model itself.

    Args:
        published: Manifests of the adapter's versions.
        listener: Notified after each pull of the adapter.
    """

    def __init__(self, shared: ActorReplica, adapter: str, published: PublishedWeights, listener: PullListener) -> None:
        self.name = shared.name
        self.shared = shared
        self.adapter = adapter
        self._published = published
        self._listener = listener

    @property
    def gauges(self) -> GaugeSummary | None:
        return self.shared.gauges

    async def stream(self, request: EngineRequest, on_chunk: OnChunk) -> Completion:
        def renamed(chunk: TokenChunk) -> None:
            on_chunk(replace(chunk, request_id=request.request_id))

        sent = replace(request, request_id=self._shared_id(request.request_id), adapter=self.adapter)
        completion = await self.shared.stream(sent, renamed)
        return replace(completion, request_id=request.request_id)

    async def pull(self, version: int) -> int:
        try:
            loaded = await self.shared.pull_adapter(version, self._published, self.adapter)
        except Exception:  # not if it is cancelled, because the engine may still load the version
            self._listener.pulled(self.name)
            raise
        self._listener.pulled(self.name)
        return loaded

    async def pause(self, mode: PauseMode) -> None:
        """Pause the requests of all adapters."""
        await self.shared.pause(mode)

    async def resume(self) -> None:
        """Resume the requests of all adapters."""
        await self.shared.resume()

    async def abort(self, request_ids: Sequence[str]) -> None:
        await self.shared.abort([self._shared_id(request_id) for request_id in request_ids])

    async def close(self) -> None:
        """Do nothing, because other adapters use the generator, too."""

    def _shared_id(self, request_id: str) -> str:
        return f"{self.adapter}:{request_id}"


def router_options(
    generation: GenerationConfig, routing: RoutingConfig, statedict: StateDictConfig, wait_s: float
) -> dict[str, Any]:
    """Make the keyword arguments of `GeneratorRouter`, except the strategy.

    A shard whose worker does not answer for `generation.stall_timeout_s`, because an environment blocks its event loop,
    is abandoned like a generator that is silent for that long.

    Args:
        wait_s: Longest time that requests wait for enough generators, in seconds.
    """
    return {
        "stall_timeout_s": generation.stall_timeout_s,
        "limits": Limits(pull_s=statedict.pull_timeout_s, no_replica_s=wait_s, shard_s=generation.stall_timeout_s),
        "least_replicas": generation.least_generators,
        "move_below": routing.move_below,
    }

"""A rollout worker's connection to a generator actor."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

from titan_rl.cluster.processes.remote_process import RemoteProcess
from titan_rl.cluster.request_stream import RequestClient
from titan_rl.core.errors import ActorDiedError, GenerationError
from titan_rl.generation.request import EngineRequest, OnChunk
from titan_rl.generation.router.shard import ShardReplica
from titan_rl.types import Completion


class GeneratorConnection(ShardReplica):
    """A `ShardReplica` that sends requests to a `GeneratorActor` and receives their tokens without the controller.

    The controller alone knows when the generator's process ends: its router then removes the replica, and requests that
    wait for an answer continue elsewhere.

    Args:
        actor: Address of the replica: its actor's handle.
        caller: Unique name of this connection, see `caller_of`.
    """

    def __init__(self, name: str, actor: Any, caller: str) -> None:
        super().__init__(name)
        self._actor = actor
        self._remote = RemoteProcess(name)
        self._client = RequestClient(self._remote, partial(actor.generate.broadcast, caller))
        self._connecting = asyncio.ensure_future(self._connect(caller))
        self._receiving = asyncio.ensure_future(self._client.run())

    async def stream(self, request: EngineRequest, on_chunk: OnChunk) -> Completion:
        await asyncio.shield(self._connecting)
        return await self._client.generate(request, on_chunk)

    async def abort(self, request_ids: Sequence[str]) -> None:
        await self._call(self._actor.abort, list(request_ids))

    async def close(self) -> None:
        self._connecting.cancel()
        self._receiving.cancel()
        self._remote.end("the router has removed it")

    async def _connect(self, caller: str) -> None:
        await self._call(self._actor.reply_to, caller, self._client.port)

    async def _call(self, endpoint: Any, *args: Any) -> Any:
        try:
            return await self._remote.call(endpoint, *args)
        except ActorDiedError as error:
            raise GenerationError(str(error)) from error

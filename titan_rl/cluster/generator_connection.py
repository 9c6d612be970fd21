"""Streams of a rollout worker to a generator actor. A `ReplicaConnection` opens them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from titan_rl.cluster.processes.remote_process import RemoteProcess
from titan_rl.cluster.request_stream import UNSENDABLE, RequestClient
from titan_rl.core.errors import ActorDiedError, GenerationError
from titan_rl.generation.request import EngineRequest, OnChunk
from titan_rl.types import Completion


class GeneratorStream:
    """A `ReplicaStream` to a `GeneratorActor`, without the controller. When it breaks, the requests that were sent
    through it and are unanswered fail.

    Only the controller learns when the generator's process ends: its router then removes the replica.

    Args:
        actor: Handle of the actor. No other stream uses it.
        caller: Unique name of this stream; see `caller_of`.
    """

    def __init__(self, name: str, actor: Any, caller: str) -> None:
        self.caller = caller
        self._actor = actor
        self._remote = RemoteProcess(name)
        self._client = RequestClient(self._remote, self._send)
        self._receiving: asyncio.Task[None] | None = None

    @property
    def broken(self) -> str | None:
        return self._remote.reason or self._client.ended

    async def connect(self, replaced: Sequence[str]) -> None:
        """Have the actor send its answers to this stream.

        Args:
            replaced: Callers whose requests the actor ends.
        """
        await self._call(self._actor.reply_to, self.caller, self._client.port, tuple(replaced))
        self._receiving = asyncio.ensure_future(self._client.run())

    async def generate(self, request: EngineRequest, on_chunk: OnChunk) -> Completion:
        return await self._client.generate(request, on_chunk)

    async def abort(self, request_ids: Sequence[str]) -> None:
        await self._call(self._actor.abort, list(request_ids))

    async def wait_broken(self) -> None:
        assert self._receiving is not None, "it is connected first"
        await asyncio.wait([self._receiving])

    def close(self) -> None:
        if self._receiving is not None:
            self._receiving.cancel()
        self._remote.end("the connection is closed")

    def _send(self, requests: list[EngineRequest]) -> None:
        try:
            self._actor.generate.broadcast(self.caller, requests)
        except UNSENDABLE:
            raise
        except Exception as error:
            self._remote.end(f"requests cannot be sent: {error!r}")
            raise

    async def _call(self, endpoint: Any, *args: Any) -> Any:
        try:
            return await self._remote.call(endpoint, *args)
        except ActorDiedError as error:
            raise GenerationError(str(error)) from error


class GeneratorStreams:
    """A `StreamOpener` of streams to a generator.

    Args:
        actor: Address of the replica: the handle of its actor. Each stream uses a new handle, because one whose actor
            was once unreachable gets no more answers.
        next_caller: Returns a unique name for each stream.
    """

    def __init__(self, name: str, actor: Any, next_caller: Callable[[], str]) -> None:
        self._name = name
        self._actor = actor
        self._next_caller = next_caller
        self._former: list[str] = []  # callers that the generator may know

    async def open(self) -> GeneratorStream:
        stream = GeneratorStream(self._name, self._actor.renewed(), self._next_caller())
        replaced = tuple(self._former)
        self._former.append(stream.caller)
        try:
            await stream.connect(replaced)
        except BaseException:
            stream.close()
            raise
        self._former = [stream.caller]
        return stream

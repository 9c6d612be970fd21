"""Connection of a shard to one replica: a stream that is reopened until the router removes the replica."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from titan_rl.core.calls.retries import Backoff
from titan_rl.core.calls.user_code import summary
from titan_rl.core.errors import GenerationError
from titan_rl.generation.request import EngineRequest, OnChunk
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
        self._why = "it connects for the first time"  # reason why there is none
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

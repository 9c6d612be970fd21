"""Request stream between a caller and a generator: batching of messages, and their packing into plain tuples. Callers
are the controller and the rollout workers.

Messages of one iteration of the event loop travel together, because a message costs more than its content. A generator
pickles dozens of completions between two engine steps; tuples and the bytes of arrays take a fraction of the time of
dataclasses and enums."""

from __future__ import annotations

import asyncio
import logging
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Generic, TypeVar

from monarch.actor import Channel, Port

from titan_rl.cluster.processes.remote_process import RemoteProcess
from titan_rl.core.arrays import LOGPROBS, TOKENS, array_from_bytes, logprob_array, token_array
from titan_rl.core.calls.user_code import summary
from titan_rl.core.errors import ActorDiedError, GenerationError, RequestError, TitanRLError
from titan_rl.generation.request import EngineRequest, OnChunk
from titan_rl.types import Completion, FinishReason, TokenChunk, VersionSpan


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """Failure of a request: it ended without a completion."""

    request_id: str
    error: TitanRLError  # can be pickled


FromGenerator = TokenChunk | Completion | RequestFailed
"""Message about a request: any number of chunks, and then its completion or failure."""

Packed = tuple[Any, ...]


def pack(message: FromGenerator) -> Packed:
    """Pack a message into a tuple of builtin values. Errors, routed experts and prompt scores stay objects."""
    match message:
        case TokenChunk():
            return (
                message.request_id,
                token_array(message.token_ids).tobytes(),
                logprob_array(message.logprobs).tobytes(),
                _pack_spans(message.version_spans),
                message.routed_experts,
                message.top_logprobs,
                _pack_allowed(message.allowed_logprobs),
            )
        case Completion():
            return (
                message.request_id,
                token_array(message.token_ids).tobytes(),
                logprob_array(message.logprobs).tobytes(),
                message.finish_reason.value,
                _pack_spans(message.version_spans),
                message.routed_experts,
                message.metrics,
                None if message.ended is None else message.ended.value,
                message.top_logprobs,
                _pack_allowed(message.allowed_logprobs),
                message.prompt_scores,
            )
        case RequestFailed():
            return message.request_id, message.error


def unpack(packed: Packed) -> FromGenerator:
    """Restore the message from its tuple; the inverse of `pack`."""
    match packed:
        case (request_id, token_ids, logprobs, spans, experts, top, allowed):
            return TokenChunk(
                request_id,
                array_from_bytes(TOKENS, token_ids),
                array_from_bytes(LOGPROBS, logprobs),
                _unpack_spans(spans),
                experts,
                top,
                _unpack_allowed(allowed),
            )
        case (request_id, token_ids, logprobs, reason, spans, experts, metrics, ended, top, allowed, scores):
            return Completion(
                request_id,
                array_from_bytes(TOKENS, token_ids),
                array_from_bytes(LOGPROBS, logprobs),
                FinishReason(reason),
                _unpack_spans(spans),
                experts,
                metrics,
                None if ended is None else FinishReason(ended),
                top,
                _unpack_allowed(allowed),
                scores,
            )
        case (request_id, error):
            return RequestFailed(request_id, error)
        case _:
            raise ValueError(f"a generator sent a tuple of {len(packed)} values")


def _pack_allowed(logprobs: Sequence[float] | None) -> bytes | None:
    return None if logprobs is None else logprob_array(logprobs).tobytes()


def _unpack_allowed(packed: bytes | None) -> Sequence[float] | None:
    return None if packed is None else array_from_bytes(LOGPROBS, packed)


def _pack_spans(spans: Sequence[VersionSpan]) -> tuple[tuple[int, int], ...]:
    return tuple([(span.version, span.num_tokens) for span in spans])


@lru_cache(maxsize=1024)  # most chunks of a version have the same number of tokens
def _unpack_spans(spans: tuple[tuple[int, int], ...]) -> tuple[VersionSpan, ...]:
    return tuple([VersionSpan(version, num_tokens) for version, num_tokens in spans])


logger = logging.getLogger(__name__)

T = TypeVar("T")


UNSENDABLE = (TypeError, AttributeError, pickle.PicklingError)
"""Errors of sending that are caused by the message, not by the connection."""


class SendBuffer(Generic[T]):
    """Buffer of the messages of one iteration of the event loop, which are sent together at its end."""

    def __init__(self, send: Callable[[list[T]], None]) -> None:
        self._send = send
        self._items: list[T] = []

    def add(self, item: T) -> None:
        if not self._items:
            asyncio.get_running_loop().call_soon(self._flush)
        self._items.append(item)

    def _flush(self) -> None:
        items, self._items = self._items, []
        self._send(items)


class RequestServer:
    """Sends completions and chunks from a generator's process to one caller."""

    def __init__(self, port: Port[list[Packed]]) -> None:
        self._port = port
        self._buffer = SendBuffer(self._send)
        self._is_closed = False

    def close(self) -> None:
        """Send nothing more."""
        self._is_closed = True

    def send(self, message: FromGenerator) -> None:
        """Send a chunk of a request or its completion, which is its last message."""
        self._buffer.add(message)

    def fail(self, request_id: str, error: Exception) -> None:
        """Report a request that ended without a completion."""
        sendable = error if isinstance(error, TitanRLError) else GenerationError(summary(error))
        self._buffer.add(RequestFailed(request_id, sendable))

    def _send(self, messages: list[FromGenerator]) -> None:
        if self._is_closed:
            return
        try:
            self._port.send([pack(message) for message in messages])
        except Exception as error:
            if len(messages) > 1:  # one of them may be the cause
                for message in messages:
                    self._send([message])
                return
            request_id = messages[0].request_id
            logger.exception("what came of request %r could not be sent", request_id)
            # Otherwise its caller would wait for a completion that is never sent.
            problem = GenerationError(f"its answer could not be sent: {error!r}")
            self._port.send([pack(RequestFailed(request_id, problem))])


class RequestClient:
    """Sends requests from one caller, and receives their completions while `run` runs.

    Attributes:
        ended: Reason why no more completions come; None until `run` ends.

    Args:
        remote: Process of the generator. Its end fails every request.
        send: Passes requests on to the generator.
    """

    def __init__(self, remote: RemoteProcess, send: Callable[[list[EngineRequest]], None]) -> None:
        self.port: Port[list[Packed]]
        self._receiver: Any
        self.port, self._receiver = Channel[list[Packed]].open()
        self._remote = remote
        self._pass_on = send
        self._buffer = SendBuffer(self._send)
        self._in_flight: dict[str, tuple[asyncio.Future[Completion], OnChunk | None]] = {}
        self.ended: str | None = None

    async def generate(self, request: EngineRequest, on_chunk: OnChunk | None = None) -> Completion:
        """Generate a completion. If the caller is cancelled, a later completion is dropped.

        Raises:
            RequestError: This request can never succeed, or its id is in use.
            GenerationError: The generator failed, its process ended, or `run` has ended.
        """
        if request.request_id in self._in_flight:
            raise RequestError(f"request id {request.request_id!r} is in use; ids must be unique")
        if self.ended is not None:
            raise GenerationError(self.ended)
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._in_flight[request.request_id] = future, on_chunk
        self._buffer.add(request)
        try:
            return await future
        finally:
            del self._in_flight[request.request_id]

    async def run(self) -> None:
        """Receive the generator's messages until its process ends or this is cancelled."""
        reason = f"nobody listens to {self._remote.name} any more"
        try:
            while True:
                async with self._remote.alive():
                    messages = await self._receiver.recv()
                for packed in messages:
                    self._receive(unpack(packed))
        except ActorDiedError as error:
            reason = str(error)
        except Exception as error:
            logger.exception("what %s sends cannot be read", self._remote.name)
            self._remote.end(f"what it sends cannot be read: {error!r}")
            reason = f"{self._remote.name} died: {self._remote.reason}"
        finally:
            self.ended = reason
            for request_id in self._in_flight:
                self._resolve(request_id, GenerationError(reason))

    def _receive(self, message: FromGenerator) -> None:
        match message:
            case TokenChunk():
                _, on_chunk = self._in_flight.get(message.request_id, (None, None))
                if on_chunk is not None:
                    on_chunk(message)
            case Completion():
                self._resolve(message.request_id, message)
            case RequestFailed():
                self._resolve(message.request_id, message.error)

    def _send(self, requests: list[EngineRequest]) -> None:
        wanted = [request for request in requests if self._is_wanted(request)]
        if not wanted:
            return
        try:
            self._pass_on(wanted)
        except Exception as error:
            if len(wanted) > 1:  # one of them may be the cause
                for request in wanted:
                    self._send([request])
                return
            unsendable = isinstance(error, UNSENDABLE)
            problem = f"request {wanted[0].request_id!r} could not be sent to {self._remote.name}: {error!r}"
            self._resolve(wanted[0].request_id, RequestError(problem) if unsendable else GenerationError(problem))

    def _is_wanted(self, request: EngineRequest) -> bool:
        future, _ = self._in_flight.get(request.request_id, (None, None))
        return future is not None and not future.done()

    def _resolve(self, request_id: str, outcome: Completion | TitanRLError) -> None:
        future, _ = self._in_flight.get(request_id, (None, None))
        if future is None or future.done():
            return
        if isinstance(outcome, Completion):
            future.set_result(outcome)
        else:
            future.set_exception(outcome)

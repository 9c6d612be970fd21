"""Request streams between generators and their callers, which are the controller and the rollout workers: batching of
messages, their packing into plain tuples, and both ends of a stream.

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
from titan_rl.core.calls.cancellation import stray_cancellation_fails
from titan_rl.core.calls.user_code import summary
from titan_rl.core.errors import ActorDiedError, GenerationError, RequestError, TitanRLError
from titan_rl.generation.loop.engine_loop import EngineLoop
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
            logger.exception("the result of request %r could not be sent", request_id)
            # Otherwise its caller would wait for a completion that is never sent.
            problem = GenerationError(f"its answer could not be sent: {error!r}")
            self._port.send([pack(RequestFailed(request_id, problem))])


CONTROLLER = "controller"
"""Caller name of the controller's own router."""


def caller_of(process_id: str, number: int) -> str:
    """Name of one connection of a process to a generator."""
    return f"{process_id}#{number}"


class RequestCallers:
    """Callers of one generator, each with a port for its own answers. Runs the requests of all callers in one engine
    loop. Request ids are unique across callers."""

    def __init__(self, loop: EngineLoop) -> None:
        self._loop = loop
        self._servers: dict[str, RequestServer] = {}  # by caller
        self._requests: dict[asyncio.Task[None], str] = {}  # the caller of each request

    def add(self, caller: str, port: Port[list[Packed]], replaced: Sequence[str] = ()) -> None:
        """Send the answers of a caller's requests to its port.

        Args:
            caller: Name that the generator has never seen before.
            replaced: Callers that this one replaces. Their requests end without an answer.
        """
        self._end(set(replaced))
        self._servers[caller] = RequestServer(port)

    def start(self, caller: str, requests: Sequence[EngineRequest]) -> None:
        """Start requests without waiting for them. Requests of a forgotten caller are dropped, because nobody waits for
        their answers."""
        if (server := self._servers.get(caller)) is None:
            return
        for request in requests:
            task = asyncio.ensure_future(self._run(server, request))
            self._requests[task] = caller
            task.add_done_callback(self._requests.pop)

    def forget(self, process_id: str) -> None:
        """End the requests of a process that has ended, without an answer."""
        self._end({caller for caller in self._servers if caller.partition("#")[0] == process_id})

    def _end(self, callers: set[str]) -> None:
        for caller in callers & self._servers.keys():
            self._servers.pop(caller).close()
        for task, caller in tuple(self._requests.items()):
            if caller in callers:
                task.cancel()  # the engine loop forgets the request

    async def _run(self, server: RequestServer, request: EngineRequest) -> None:
        try:
            with stray_cancellation_fails(f"request {request.request_id!r}"):
                server.send(await self._loop.stream(request, server.send))
        except Exception as error:
            server.fail(request.request_id, error)


class RequestClient:
    """Sends requests of one caller to a `GeneratorActor`, and receives their completions while it is connected.

    Attributes:
        ended: Reason why no more completions come; None until then.

    Args:
        remote: Process of the generator. Its end fails every request.
        actor: Handle of the actor.
        caller: Unique name of the caller; see `caller_of`.
    """

    def __init__(self, remote: RemoteProcess, actor: Any, caller: str) -> None:
        self._port: Port[list[Packed]]
        self._receiver: Any
        self._port, self._receiver = Channel[list[Packed]].open()
        self._remote = remote
        self._actor = actor
        self.caller = caller
        self._buffer = SendBuffer(self._send)
        self._in_flight: dict[str, tuple[asyncio.Future[Completion], OnChunk]] = {}
        self._receiving: asyncio.Task[None] | None = None
        self.ended: str | None = None

    async def connect(self, replaced: Sequence[str] = ()) -> None:
        """Have the actor send its answers here.

        Args:
            replaced: Callers whose requests the actor ends.
        """
        await call_generator(self._remote, self._actor.reply_to, self.caller, self._port, tuple(replaced))
        self._receiving = asyncio.ensure_future(self._receive())

    def disconnect(self) -> None:
        """Stop receiving completions. Requests without a completion fail."""
        if self._receiving is not None:
            self._receiving.cancel()

    async def generate(self, request: EngineRequest, on_chunk: OnChunk) -> Completion:
        """Generate a completion. If the caller is cancelled, a later completion is dropped.

        Raises:
            RequestError: This request can never succeed, or its id is in use.
            GenerationError: The generator failed, its process ended, or this is no longer connected.
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

    async def _receive(self) -> None:
        """Receive the generator's messages until its process ends or this is cancelled."""
        reason = f"the connection to {self._remote.name} is closed"
        try:
            while True:
                async with self._remote.alive():
                    messages = await self._receiver.recv()
                for packed in messages:
                    self._take(unpack(packed))
        except ActorDiedError as error:
            reason = str(error)
        except Exception as error:
            logger.exception("messages of %s cannot be read", self._remote.name)
            self._remote.end(f"its messages cannot be read: {error!r}")
            reason = f"{self._remote.name} died: {self._remote.reason}"
        finally:
            self.ended = reason
            for request_id in self._in_flight:
                self._resolve(request_id, GenerationError(reason))

    def _take(self, message: FromGenerator) -> None:
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

    def _pass_on(self, requests: list[EngineRequest]) -> None:
        self._actor.generate.broadcast(self.caller, requests)

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


async def call_generator(remote: RemoteProcess, endpoint: Any, *args: Any) -> Any:
    """Call an endpoint of a generator; see `RemoteProcess.call`.

    Raises:
        GenerationError: The process has ended.
    """
    try:
        return await remote.call(endpoint, *args)
    except ActorDiedError as error:
        raise GenerationError(str(error)) from error


class GeneratorStream(RequestClient):
    """A `ReplicaStream` of a rollout worker to a `GeneratorActor`, without the controller. When it breaks, the requests
    that were sent through it and are unanswered fail.

    Only the controller learns when the generator's process ends: its router then removes the replica.

    Args:
        actor: Handle of the actor. No other stream uses it.
    """

    def __init__(self, name: str, actor: Any, caller: str) -> None:
        super().__init__(RemoteProcess(name), actor, caller)

    @property
    def broken(self) -> str | None:
        return self._remote.reason or self.ended

    async def abort(self, request_ids: Sequence[str]) -> None:
        await call_generator(self._remote, self._actor.abort, list(request_ids))

    async def wait_broken(self) -> None:
        assert self._receiving is not None, "it is connected first"
        await asyncio.wait([self._receiving])

    def close(self) -> None:
        self.disconnect()
        self._remote.end("the connection is closed")

    def _pass_on(self, requests: list[EngineRequest]) -> None:
        try:
            super()._pass_on(requests)
        except UNSENDABLE:
            raise
        except Exception as error:
            self._remote.end(f"requests cannot be sent: {error!r}")
            raise


class GeneratorStreams:
    """A `StreamOpener` of streams to a generator. A `ReplicaConnection` opens them.

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

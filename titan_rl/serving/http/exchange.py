"""Exchange of one request, from its arrival to its answer: server limits, server metrics, streams of events."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.types import Message, Receive, Scope, Send

from titan_rl.serving.http.errors import OPENAI, ApiError, Dialect, api_error_of


@dataclass(frozen=True, slots=True)
class PositiveLimits:
    """Base of limits that all must be positive.

    Raises:
        ValueError: A limit is not positive. The message names it.
    """

    def __post_init__(self) -> None:
        for field in fields(self):
            if not getattr(self, field.name) > 0:
                name, value = f"{type(self).__name__}.{field.name}", getattr(self, field.name)
                raise ValueError(f"{name} is {value!r}; it must be greater than 0")


@dataclass(frozen=True, slots=True)
class ServerLimits(PositiveLimits):
    """Limits of a server.

    Args:
        head_bytes: Maximum size of a request's path, headers and trailers. If a request exceeds it, the connection is
            closed.
        head_s: Time limit for the arrival of a request's headers, in seconds. Later the connection is closed.
        body_bytes: Maximum size of a request's body. A larger one is answered with 413.
        body_s: Time limit for the arrival of a request's body, in seconds. Later the answer is 408.
        num_choices: Maximum number of completions of one request (its `n` times its prompts). More are answered with
            400.
        num_places: Maximum number of completions at a time. A request that finds too few free places is answered with
            429 and `Retry-After`.
        request_s: Time limit for the complete answer, pauses included, in seconds. Later the answer is 504. A stream
            that has begun ends with the error as its last event.
        read_s: Longest time for which a client does not read, in seconds. Later it counts as disconnected.
        keep_alive_s: Interval of keep-alive comments in a stream without events, in seconds.
        num_conversations: Maximum number of conversations that are remembered, so that they keep their tokens when a
            client sends them back as messages.
        conversation_turns: Maximum number of turns of each of them. A longer conversation starts over.
        conversation_bytes: Approximate memory for all of them.
        response_bytes: Memory for stored responses with their conversations, which clients can continue or retrieve,
            and the same amount for the conversations of message threads.
    """

    head_bytes: int = 64 << 10
    head_s: float = 60.0
    body_bytes: int = 8 << 20
    body_s: float = 60.0
    num_choices: int = 128
    num_places: int = 4096
    request_s: float = 3600.0
    read_s: float = 60.0
    keep_alive_s: float = 15.0
    num_conversations: int = 4096
    conversation_turns: int = 1024
    conversation_bytes: int = 1 << 30
    response_bytes: int = 256 << 20


_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)


class ServerMetrics:
    """Metrics of one application. Another application in the same process has its own."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        timer = partial(Histogram, buckets=_SECONDS, registry=registry)
        counter = partial(Counter, registry=registry)
        self.responses = counter("titan_rl_responses", "Responses, by path and status.", ("path", "status"))
        self.completions_running = Gauge("titan_rl_completions_running", "Completions in progress.", registry=registry)
        self.prompt_tokens = counter("titan_rl_prompt_tokens", "Prompt tokens.")
        self.completion_tokens = counter("titan_rl_completion_tokens", "Sampled tokens.")
        self.gone = counter("titan_rl_clients_gone", "Requests whose client disconnected before the answer.")
        self.first_token_s = timer(
            "titan_rl_time_to_first_token_seconds", "From the request to the first token of a completion."
        )
        self.completion_s = timer("titan_rl_completion_seconds", "From the request to the last token of a completion.")

    def text(self) -> bytes:
        return generate_latest(self._registry)


KEEP_ALIVE = b": waiting\n\n"
"""Keep-alive comment in a stream, which clients skip."""


class Events:
    """Queue of events to send. The sender waits in `next`, and is woken once for all events of one iteration of the
    event loop.

    Args:
        keep_alive_s: Time without an event after which a keep-alive comment is sent, in seconds.
    """

    def __init__(self, keep_alive_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._keep_alive_s = keep_alive_s
        self._events: list[bytes] = []
        self._woken: asyncio.Future[None] = self._loop.create_future()
        self._taken_at = self._loop.time()
        self._timer = self._loop.call_later(keep_alive_s, self._keep_alive)

    def add(self, event: bytes) -> None:
        self._events.append(event)
        self.wake()

    def wake(self, _: object = None) -> None:
        """Make `next` return, even without events."""
        if not self._woken.done():
            self._woken.set_result(None)

    async def next(self) -> bytes:
        """Wait for events, and return all that came since the previous call."""
        await self._woken
        self._woken, self._taken_at = self._loop.create_future(), self._loop.time()
        events, self._events = self._events, []
        return b"".join(events)

    def close(self) -> None:
        self._timer.cancel()

    def _keep_alive(self) -> None:
        """Add a keep-alive comment if no event came since the last one. There is one timer for the whole stream."""
        due_s = self._taken_at + self._keep_alive_s - self._loop.time()
        if due_s <= 0 and not self._events:
            self.add(KEEP_ALIVE)
        self._timer = self._loop.call_later(due_s if due_s > 0 else self._keep_alive_s, self._keep_alive)


Emit = Callable[[Any], None]
"""Function that takes the next event of a stream, which is sent as JSON."""

LAST_WORD_S = 5.0
"""Time limit for sending an error after the request has timed out, in seconds."""


class ClientGoneError(Exception):
    """The client has disconnected."""


class Exchanges:
    """All requests in flight, and the numbers of completions that they generate."""

    def __init__(self, limits: ServerLimits, metrics: ServerMetrics) -> None:
        self.limits = limits
        self.metrics = metrics
        self._free = limits.num_places
        self._open: dict[asyncio.Timeout, Exception | None] = {}  # by request: the error that has ended it
        self._closed = False

    @property
    def num_completions_running(self) -> int:
        return self.limits.num_places - self._free

    def close(self) -> None:
        """End every request with a 503, and refuse later ones."""
        self._closed = True
        for scope in list(self._open):
            self._end(scope, _closing())

    @asynccontextmanager
    async def open(self, receive: Receive, num_completions: int) -> AsyncGenerator[None]:
        """Context manager of a request with `num_completions` completions. The block is cancelled if the client
        disconnects or its time is up.

        Raises:
            ClientGoneError: The client has disconnected.
            ApiError: With status 429 if there are too few places, 503 if the server closes, or 504 if the time is up.
        """
        if self._closed:
            raise _closing()
        if num_completions > self._free:
            raise ApiError(
                429,
                f"the server has {self._free} free places for completions, and the request needs {num_completions}",
                code="too_many_requests",
                headers={"retry-after": "1"},
            )
        scope = asyncio.timeout(self.limits.request_s)
        self._open[scope] = None
        self._take(num_completions)
        watcher = asyncio.create_task(self._watch(receive, scope))
        try:
            async with scope:
                yield
        except TimeoutError as error:
            if not scope.expired():
                raise
            late = f"the request was not answered within {self.limits.request_s:g} s"
            raise self._open[scope] or ApiError(504, late, code="timeout") from error
        finally:
            watcher.cancel()
            self._take(-num_completions)
            del self._open[scope]

    async def _watch(self, receive: Receive, scope: asyncio.Timeout) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._end(scope, ClientGoneError())

    def _end(self, scope: asyncio.Timeout, error: Exception) -> None:
        if scope in self._open and self._open[scope] is None and not scope.expired():
            self._open[scope] = error
            scope.reschedule(asyncio.get_running_loop().time())

    def _take(self, num_completions: int) -> None:
        self._free -= num_completions
        self.metrics.completions_running.inc(num_completions)


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer to one request, as an ASGI application. All work happens within `Exchanges.open`.

    Args:
        work: Called with None, returns the body. Called with an `Emit`, passes each event of the stream to it.
        num_completions: Number of completions that it generates at once.
        dialect: Form of answers in the request's protocol.
    """

    exchanges: Exchanges
    work: Callable[[Emit | None], Awaitable[Any]]
    num_completions: int = 1
    stream: bool = False
    dialect: Dialect = OPENAI

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = _Response(send)
        try:
            async with self.exchanges.open(receive, self.num_completions):
                if self.stream:
                    await self._send_events(response)
                else:
                    await send_json(response.send, 200, await self.work(None))
        except ClientGoneError:
            self.exchanges.metrics.gone.inc()
        except Exception as error:
            reported = api_error_of(error, scope["request_id"])
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LAST_WORD_S):  # the client may not read
                    if not response.started:
                        await send_error(send, reported, self.dialect)
                    elif self.stream:
                        event = self.dialect.event(self.dialect.stream_error(reported))
                        await response.send_chunk(event + self.dialect.last, more=False)

    async def _send_events(self, response: _Response) -> None:
        """Send events as they are emitted: those of one iteration of the event loop in one piece, and the last with the
        end. The first event starts the response, so that an earlier failure can be answered with its own status."""
        events = Events(self.exchanges.limits.keep_alive_s)

        def emit(data: Any) -> None:
            events.add(self.dialect.event(data))

        async def work() -> None:
            await self.work(emit)

        task = asyncio.create_task(work())
        task.add_done_callback(events.wake)
        try:
            while True:
                chunk, is_over = await events.next(), task.done()
                if is_over and task.exception() is None:
                    await response.send_chunk(chunk + self.dialect.last, more=False)
                    return
                if chunk:
                    await response.send_chunk(chunk, more=True)
                if is_over:
                    task.result()
        finally:
            events.close()
            if not task.done():
                task.cancel()
                await asyncio.wait((task,), timeout=LAST_WORD_S)


class _Response:
    """One response being sent.

    Attributes:
        started: Whether its head has been sent.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self.started = False

    async def send(self, message: Message) -> None:
        self.started = True
        await self._send(message)

    async def send_chunk(self, chunk: bytes, *, more: bool) -> None:
        """Send a part of a stream. Starts the response if nothing has been sent."""
        if not self.started:
            headers = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
            await send_start(self.send, 200, headers)
        await self._send({"type": "http.response.body", "body": chunk, "more_body": more})


async def send_start(send: Send, status: int, headers: Mapping[str, str]) -> None:
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})


def encoded(body: Any) -> msgspec.Raw:
    """Encode a body early, before steps that must not happen if it cannot be encoded."""
    return msgspec.Raw(msgspec.json.encode(body))


async def send_json(send: Send, status: int, body: Any, headers: Mapping[str, str] | None = None) -> None:
    sent = msgspec.json.encode(body)
    length = {"content-type": "application/json", "content-length": str(len(sent))}
    await send_start(send, status, {**length, **(headers or {})})
    await send({"type": "http.response.body", "body": sent, "more_body": False})


async def send_error(send: Send, error: ApiError, dialect: Dialect = OPENAI) -> None:
    await send_json(send, error.status, dialect.error(error), error.headers)


def _closing() -> ApiError:
    return ApiError(503, "the server is closing", headers={"retry-after": "1"})

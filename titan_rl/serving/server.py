"""HTTP server for a `PolicyApp`: its listening socket, its connections, and its run within an event loop."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from titan_rl.core.calls.parsing import names_this_machine
from titan_rl.core.errors import ConfigError
from titan_rl.core.http_server import HttpServer, listening_socket
from titan_rl.serving.api_keys import Keys
from titan_rl.serving.app import PolicyApp
from titan_rl.serving.http.exchange import ServerLimits

GRACE_S = 5
"""Grace period of connections when the server stops, in seconds."""


@asynccontextmanager
async def serve(app: PolicyApp, *, host: str = "127.0.0.1", port: int = 0) -> AsyncGenerator[str]:
    """Context manager that serves an application. At the end, requests in flight get a 503 and the port is freed.

    Example, on a port that the system chooses:

        async with serve(make_app(router.stream, model="policy", max_context=4096)) as url:
            print(url)  # http://127.0.0.1:43210

    Args:
        host: Address of this machine. Addresses other than loopback require keys for clients.

    Returns:
        URL of the server.

    Raises:
        ConfigError: The address is not loopback and there are no keys, or it cannot be bound.
    """
    listener = listener_of(host, port, app.keys)
    bound = listener.getsockname()[1]
    started = asyncio.Event()
    server = HttpServer(
        app,
        started.set,
        http=partial(Connection, app.exchanges.limits),
        timeout_keep_alive=75,  # longer than clients keep idle connections, so that clients close them
        timeout_graceful_shutdown=GRACE_S,
    )
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    ready = asyncio.ensure_future(started.wait())
    try:
        await asyncio.wait((serving, ready), return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            serving.result()
        yield f"http://{f'[{host}]' if ':' in host else host}:{bound}"
    finally:
        ready.cancel()
        app.exchanges.close()
        server.should_exit = True
        try:
            await asyncio.shield(serving)  # frees the port, even if the block was cancelled
        finally:
            listener.close()


def external_url(url: str) -> str:
    """Replace 0.0.0.0 or [::], which stand for all addresses of the machine, in a URL by the machine's host name."""
    scheme, _, address = url.partition("://")
    host, _, port = address.rpartition(":")
    return f"{scheme}://{socket.gethostname()}:{port}" if host in ("0.0.0.0", "[::]") else url


def listener_of(host: str, port: int, keys: Keys) -> socket.socket:
    """Open a listening socket, which the caller has to close.

    Raises:
        ConfigError: The address is not loopback and there are no keys, or it cannot be bound.
    """
    if not (names_this_machine(host) or keys.required):
        raise ConfigError(
            f"host is {host!r}, which other machines can reach, but there is no key for clients; give it one: "
            "Keys(api=[...]), or TITAN_RL_API_KEY in the environment of titan-rl serve"
        )
    try:
        return listening_socket(host, port)
    except (OSError, OverflowError, ValueError) as error:
        raise ConfigError(f"cannot listen on host {host!r} and port {port}: {error}") from error


LINGER_S = 2.0
"""Time for which the rest of a refused body is read and dropped, in seconds, so that its client can read the error."""

_AROUND_A_HEADER = len(": \r\n")


class HeadWithBody:
    """Transport that sends the head of a response together with the data that is written next, at once or in the same
    iteration of the event loop. A packet costs more than most answers, and each packet wakes its reader."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._is_head_next = False
        self._head = b""

    def begin_response(self) -> None:
        """Expect a head in the next write."""
        self._is_head_next = True

    def write(self, data: bytes) -> None:
        if self._is_head_next:
            self._is_head_next, self._head = False, data
            self._loop.call_soon(self._send_head)
        elif self._head:
            head, self._head = self._head, b""
            self._transport.write(head + data)
        else:
            self._transport.write(data)

    def close(self) -> None:
        self._send_head()
        self._transport.close()

    def _send_head(self) -> None:
        if self._head:
            head, self._head = self._head, b""
            self._transport.write(head)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class Connection(HttpToolsProtocol):
    """Uvicorn's protocol with limits on what happens outside the application: a request's head, the rest of a body
    after its answer, and output that a client does not read.

    Args:
        limits: Limits of the server, of which `head_bytes`, `head_s` and `read_s` are enforced here.
    """

    def __init__(self, limits: ServerLimits, **uvicorns: Any) -> None:
        super().__init__(**uvicorns)
        self._limits = limits
        self._head_bytes: int | None = None  # bytes of the arriving head after its first packet
        self._counted_bytes = 0  # of a request's path, headers and trailers
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self._written = HeadWithBody(transport, self.loop)
        super().connection_made(self._written)  # pyright: ignore[reportArgumentType]
        self._start_timer("head", self._limits.head_s)

    def connection_lost(self, exc: Exception | None) -> None:
        for what in list(self._timers):
            self._stop_timer(what)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._head_bytes is not None:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes is not None and self._head_bytes > self._limits.head_bytes:
            self.transport.abort()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_bytes = self._counted_bytes = 0
        self._start_timer("head", self._limits.head_s)

    def on_url(self, url: bytes) -> None:
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_head(len(name) + len(value) + _AROUND_A_HEADER)
        super().on_header(name, value)

    def _count_head(self, num_bytes: int) -> None:
        """Count bytes of the head.

        Raises:
            ValueError: There are too many. It stops the parser, so that an incomplete request is not answered.
        """
        self._counted_bytes += num_bytes
        if self._counted_bytes > self._limits.head_bytes:
            self.transport.abort()
            raise ValueError(f"the head of a request has more than {self._limits.head_bytes} bytes")

    def send_400_response(self, msg: str) -> None:
        if not self.transport.is_closing():
            super().send_400_response(msg)

    def on_headers_complete(self) -> None:
        self._head_bytes = None
        self._stop_timer("head")
        self._written.begin_response()
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        is_pipelined = bool(self.pipeline)  # if so, the body that is arriving belongs to the next request
        super().on_response_complete()
        if self.cycle.more_body and not is_pipelined:  # it was answered before its body had arrived
            self._start_timer("body", min(LINGER_S, self._limits.body_s))

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._stop_timer("body")

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start_timer("read", self._limits.read_s)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_timer("read")

    def _start_timer(self, what: str, seconds: float) -> None:
        """Abort the connection after a timeout, unless `_stop_timer` is called first."""
        if what not in self._timers:
            self._timers[what] = self.loop.call_later(seconds, self.transport.abort)

    def _stop_timer(self, what: str) -> None:
        if (timer := self._timers.pop(what, None)) is not None:
            timer.cancel()

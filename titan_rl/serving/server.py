"""Running the application in the event loop that runs already."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from functools import partial

import uvicorn

from titan_rl.serving.app import PolicyApp
from titan_rl.serving.http.address import listener_of
from titan_rl.serving.http.connection import Connection

GRACE_S = 5
"""How long a connection may take to end when the server does."""


@asynccontextmanager
async def serve(app: PolicyApp, *, host: str = "127.0.0.1", port: int = 0) -> AsyncGenerator[str]:
    """Within the block the application is served. At its end, requests under way get a 503 and the port is free.

    Example: on a port that the system picks:

        async with serve(make_app(router.stream, model="policy", max_context=4096)) as url:
            print(url)  # http://127.0.0.1:43210

    Args:
        host: an address of this machine. Others than loopback need keys for clients.

    Returns:
        Where it is served.

    Raises:
        ConfigError: the address is not loopback and there are no keys, or it cannot be bound.
    """
    listener = listener_of(host, port, app.keys)
    bound = listener.getsockname()[1]
    config = uvicorn.Config(
        app,
        http=partial(Connection, app.exchanges.limits),  # pyright: ignore[reportArgumentType]
        lifespan="off",
        ws="none",
        log_config=None,
        log_level="warning",  # below, it logs the headers of each request
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=75,  # longer than clients keep idle connections, which then close them themselves
        timeout_graceful_shutdown=GRACE_S,
    )
    server = _Server(config)
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    ready = asyncio.ensure_future(server.ready.wait())
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
            await asyncio.shield(serving)  # it lets go of the port, also where the block was cancelled
        finally:
            listener.close()


def seen_from_elsewhere(url: str) -> str:
    """The URL with the machine's host name, where it is of all addresses of the machine: 0.0.0.0 or [::]."""
    scheme, _, address = url.partition("://")
    host, _, port = address.rpartition(":")
    return f"{scheme}://{socket.gethostname()}:{port}" if host in ("0.0.0.0", "[::]") else url


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        """Signals are the run's, not the server's."""
        yield

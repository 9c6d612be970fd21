"""HTTP server within a command: a listening socket, and uvicorn without its own logs and signals."""

from __future__ import annotations

import socket
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import uvicorn


def listening_socket(host: str, port: int) -> socket.socket:
    """Open a listening socket, which the caller has to close.

    Args:
        port: Port, or 0 for any.

    Raises:
        OSError: The address cannot be bound.
        OverflowError: The port is not between 0 and 65535.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio disables Nagle's algorithm only for sockets with an explicit TCP protocol; otherwise every answer waits 40
    # ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(2048)
    except BaseException:
        listener.close()
        raise
    return listener


class HttpServer(uvicorn.Server):
    """Uvicorn's server that leaves logs and signals to the command.

    Args:
        ready: Called once requests are answered.
        options: Further options of `uvicorn.Config`.
    """

    def __init__(self, app: Any, ready: Callable[[], object], **options: Any) -> None:
        # On a level below "warning", uvicorn logs the headers of each request.
        logs: dict[str, Any] = {"log_config": None, "log_level": "warning", "access_log": False}
        plain: dict[str, Any] = {"lifespan": "off", "ws": "none", "server_header": False, "proxy_headers": False}
        super().__init__(uvicorn.Config(app, **logs, **plain, **options))
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        """Leave signals to the command."""
        yield

"""Serves the viewer to this machine, until a signal."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
from collections.abc import Callable, Generator

import uvicorn

from titan_rl.core.errors import ConfigError
from titan_rl.viewer.app import ViewerApp

HOST = "127.0.0.1"
PORT = 8484
GRACE_S = 1
"""How long an answer may take once the server is to end."""


def listen(port: int | None) -> socket.socket:
    """A socket that listens on loopback, for its owner to close.

    Args:
        port: None for `PORT`, or any that is free where it is taken; 0 for any.

    Raises:
        ConfigError: it cannot be listened on.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((HOST, PORT if port is None else port))
        except OSError as error:
            if port is not None or error.errno != errno.EADDRINUSE:
                raise
            listener.bind((HOST, 0))
        listener.listen()
    except (OSError, OverflowError) as error:
        listener.close()
        said = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
        raise ConfigError(f"--port {port}: {said}; take another one, or 0 for any that is free") from None
    return listener


def run_viewer(app: ViewerApp, listener: socket.socket, ready: Callable[[], None]) -> int:
    """Serve until SIGINT or SIGTERM.

    Args:
        ready: called once answers are given.

    Returns:
        128 + the number of the signal.
    """
    return asyncio.run(_serve(app, listener, ready))


async def _serve(app: ViewerApp, listener: socket.socket, ready: Callable[[], None]) -> int:
    config = uvicorn.Config(
        app,
        lifespan="off",
        ws="none",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=GRACE_S,
    )
    server = _Server(config, ready)
    loop, received = asyncio.get_running_loop(), [0]

    def stop(signum: int) -> None:
        received[0] = signum
        app.end()
        server.should_exit = True

    for signum in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signum, stop, signum)
    await server.serve(sockets=[listener])
    return 128 + received[0] if received[0] else 0


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """They are this module's."""
        yield

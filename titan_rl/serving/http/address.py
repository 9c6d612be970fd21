"""Where a server listens."""

from __future__ import annotations

import socket

from titan_rl.core.calls.loopback import names_this_machine
from titan_rl.core.errors import ConfigError
from titan_rl.serving.http.keys import Keys


def listener_of(host: str, port: int, keys: Keys) -> socket.socket:
    """A socket that listens there, for its owner to close.

    Raises:
        ConfigError: the address is not loopback and there are no keys, or it cannot be bound.
    """
    if not (names_this_machine(host) or keys.required):
        raise ConfigError(
            f"host is {host!r}, which others can reach, and there is no key for clients; give it one: Keys(api=[...]), "
            "or TITAN_RL_API_KEY in the environment of titan-rl serve"
        )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns Nagle's algorithm off for sockets that say they are TCP, and else every answer waits 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(2048)
    except (OSError, OverflowError, ValueError) as error:
        listener.close()
        raise ConfigError(f"host {host!r} and port {port} cannot be served on: {error}") from error
    return listener

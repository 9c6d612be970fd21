"""The keys of a server, and whether its address can be served on with them."""

from __future__ import annotations

import os

from titan_rl.config.serve import ServerConfig
from titan_rl.serving.http.address import listener_of
from titan_rl.serving.http.keys import Keys

API_KEY, ADMIN_KEY = "TITAN_RL_API_KEY", "TITAN_RL_ADMIN_KEY"


def take_keys(server: ServerConfig) -> Keys:
    """Those that the environment names, where no other process will find them. Nothing listens yet.

    Raises:
        ConfigError: they are not usable as keys, or the server's address needs some, or it cannot be bound.
    """
    api, admin = os.environ.pop(API_KEY, None), os.environ.pop(ADMIN_KEY, None)
    keys = Keys(() if api is None else [api], admin)
    listener_of(server.host, server.port, keys).close()
    return keys

"""Connections to a worker that does not exist."""

from __future__ import annotations

import socket

import pytest

from titan_rl.cluster.hosts.host import connect_to_worker
from titan_rl.core.errors import ActorDiedError


async def test_connection_error_names_the_missing_worker() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        worker = f"127.0.0.1:{taken.getsockname()[1]}"
    with pytest.raises(
        ActorDiedError, match=f"^no worker at {worker}: it cannot be reached: Connection refused; start"
    ):
        await connect_to_worker("run", worker, 1.0)

"""Monarch as a worker starts it for a run."""

from __future__ import annotations

import asyncio
import socket
import sys
from asyncio.subprocess import PIPE

import pytest

pytest.importorskip("monarch", reason="needs the cpu or gpu extra")

from titan_rl.actors.hosts.monarch_host import READY

COUNT = 8  # on a busy machine each listens a moment after it has begun to


async def is_reached_once_ready() -> bool:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "titan_rl.actors.hosts.monarch_host", f"tcp://127.0.0.1:{port}"]
    process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    while (line := await process.stdout.readline()) != f"{READY}\n".encode():
        assert line, "it ended"
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except ConnectionRefusedError:
        return False
    finally:
        process.stdin.close()
        assert await process.wait() == 0
    return True


async def test_whoever_is_told_that_it_is_ready_reaches_it() -> None:
    async with asyncio.timeout(60):
        assert all(await asyncio.gather(*[is_reached_once_ready() for _ in range(COUNT)]))

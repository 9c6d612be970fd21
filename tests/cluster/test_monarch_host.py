"""The Monarch process that a worker starts for a run."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import sys
import tempfile
from asyncio.subprocess import PIPE
from collections.abc import Iterator
from pathlib import Path

import pytest
from background import HANG_S

pytest.importorskip("monarch", reason="needs the cpu or gpu extra")

from titan_rl.cluster.hosts.folders import FOLDER
from titan_rl.cluster.hosts.host import connect_to_worker
from titan_rl.cluster.hosts.host_worker_server import WorkerServer, reserved_port
from titan_rl.cluster.hosts.monarch_host import READY

COUNT = 8  # several, to load the machine: the race is between reporting ready and listening


async def is_reached_once_ready() -> bool:
    with reserved_port("127.0.0.1") as port:
        return await is_reached_once_ready_at(port)


async def is_reached_once_ready_at(port: int) -> bool:
    command = [sys.executable, "-m", "titan_rl.cluster.hosts.monarch_host", f"tcp://127.0.0.1:{port}"]
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


async def test_monarch_accepts_connections_once_it_reports_ready() -> None:
    async with asyncio.timeout(HANG_S):
        assert all(await asyncio.gather(*[is_reached_once_ready() for _ in range(COUNT)]))


def test_reserved_port_refuses_a_plain_bind_but_allows_a_listener() -> None:
    with reserved_port("127.0.0.1") as port:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
        with socket.create_server(("127.0.0.1", port)):
            socket.create_connection(("127.0.0.1", port)).close()


def logs_of(worker: Path) -> list[Path]:
    return [*Path("/tmp").glob(f"*/monarch_log_{worker.name}-*")]


@pytest.fixture
def worker() -> Iterator[Path]:
    """A worker's folder. The log contains its name, which is unique among concurrent tests."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


async def test_monarch_log_is_private_and_removed_with_the_run(worker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER, str(worker))
    for limit in (
        "host_worker_server.START_S",
        "host.MONARCH_TIMEOUT_S",
        "host.REACH_TIMEOUT_S",
        "host_worker_server.HELLO_S",
    ):
        monkeypatch.setattr(f"titan_rl.cluster.hosts.{limit}", HANG_S)
    before = os.umask(0o022)
    serving = asyncio.ensure_future(WorkerServer(listener := socket.create_server(("127.0.0.1", 0))).serve())
    try:
        one = await connect_to_worker("run", f"127.0.0.1:{listener.getsockname()[1]}", HANG_S)
        await one.monarch()
        (log,) = logs_of(worker)
        assert stat.S_IMODE(log.stat().st_mode) == 0o600
        one.close()
    finally:
        os.umask(before)
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
    assert logs_of(worker) == []

"""Monarch as a worker starts it for a run."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import sys
from asyncio.subprocess import PIPE
from pathlib import Path

import pytest
from background import HANG_S

pytest.importorskip("monarch", reason="needs the cpu or gpu extra")

from titan_rl.cluster.hosts.folders import FOLDER
from titan_rl.cluster.hosts.host import connect_to_worker
from titan_rl.cluster.hosts.monarch_host import READY
from titan_rl.cluster.hosts.worker_server import WorkerServer

COUNT = 8  # on a busy machine each listens a moment after it has begun to


async def is_reached_once_ready() -> bool:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
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


async def test_whoever_is_told_that_it_is_ready_reaches_it() -> None:
    async with asyncio.timeout(HANG_S):
        assert all(await asyncio.gather(*[is_reached_once_ready() for _ in range(COUNT)]))


def logs_of(worker: Path) -> list[Path]:
    return [*Path("/tmp").glob(f"*/monarch_log_{worker.name}-*")]


async def test_its_log_is_for_the_user_alone_and_goes_with_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    before = os.umask(0o022)
    serving = asyncio.ensure_future(WorkerServer(listener := socket.create_server(("127.0.0.1", 0))).serve())
    try:
        one = await connect_to_worker("run", f"127.0.0.1:{listener.getsockname()[1]}", 30.0)
        await one.monarch()
        (log,) = logs_of(tmp_path)
        assert stat.S_IMODE(log.stat().st_mode) == 0o600
        one.close()
    finally:
        os.umask(before)
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
    assert logs_of(tmp_path) == []

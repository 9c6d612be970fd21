"""Runs that connect to a worker. Its Monarch processes are fakes; the connections are real."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator

import pytest

pytest.importorskip("monarch", reason="needs the cpu or gpu extra")

from titan_rl.cluster.hosts import host, host_worker_server
from titan_rl.cluster.hosts.host import WorkerConnection, connect_to_worker, worker_id_at
from titan_rl.cluster.hosts.host_worker_server import WorkerServer
from titan_rl.core.console import LOG, Console
from titan_rl.core.errors import ActorDiedError, ConfigError


class Monarchs:
    """Monarch processes that a worker has started. Each lasts until its event in `running` is set."""

    def __init__(self) -> None:
        self.running: list[asyncio.Event] = []
        self.num_started = 0

    @contextlib.asynccontextmanager
    async def one(self, host: str) -> AsyncGenerator[tuple[object, str]]:
        self.num_started += 1
        self.running.append(ended := asyncio.Event())
        try:
            yield _Process(len(self.running) - 1), f"tcp://{host}:{self.num_started}"
        finally:
            ended.set()

    async def end_of_children(self, number: int) -> None:
        await self.running[number].wait()


class _Process:
    def __init__(self, pid: int) -> None:
        self.pid = pid


@pytest.fixture
def monarchs(monkeypatch: pytest.MonkeyPatch) -> Monarchs:
    made = Monarchs()
    monkeypatch.setattr(host_worker_server, "_monarch", made.one)
    monkeypatch.setattr(host_worker_server, "_end_of_children", made.end_of_children)
    return made


@contextlib.asynccontextmanager
async def worker(console: Console = LOG) -> AsyncGenerator[int]:
    """Run a worker, and yield its port."""
    listener = socket.create_server(("127.0.0.1", 0))
    serving = asyncio.ensure_future(WorkerServer(listener, console).serve())
    try:
        yield listener.getsockname()[1]
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


@contextlib.asynccontextmanager
async def connected(run: str, address: str) -> AsyncGenerator[WorkerConnection]:
    one = await connect_to_worker(run, address, 30.0)
    try:
        yield one
    finally:
        one.close()


async def test_naming_a_worker_twice_is_rejected_and_keeps_the_first_monarch(monarchs: Monarchs):
    async with worker() as port, connected("a", f"127.0.0.1:{port}") as first:
        await first.monarch()
        first.close()  # the worker watches it from now on
        async with connected("a", f"localhost:{port}") as second:
            with pytest.raises(ConfigError, match=rf"127.0.0.1:{port} and localhost:{port} are the same worker"):
                await second.monarch()
        assert [ended.is_set() for ended in monarchs.running] == [False]


async def test_run_waits_until_the_previous_one_has_ended(monarchs: Monarchs, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host, "MONARCH_TIMEOUT_S", 0.5)
    async with worker() as port, connected("a", f"127.0.0.1:{port}") as first:
        await first.monarch()
        first.close()
        async with connected("b", f"127.0.0.1:{port}") as second:
            with pytest.raises(ActorDiedError, match="is in use by another run"):
                await second.monarch()
        assert [ended.is_set() for ended in monarchs.running] == [False]
        monkeypatch.setattr(host, "MONARCH_TIMEOUT_S", 30.0)
        async with connected("c", f"127.0.0.1:{port}") as third:
            waiting = asyncio.ensure_future(third.monarch())
            monarchs.running[0].set()
            assert (await waiting).startswith("tcp://127.0.0.1:")


async def test_reconnecting_run_gets_a_new_monarch(monarchs: Monarchs):
    async with worker() as port, connected("a", f"127.0.0.1:{port}") as first:
        before = await first.monarch()
        async with connected("a", f"127.0.0.1:{port}") as second:
            assert await second.monarch() != before
        assert monarchs.running[0].is_set()


@pytest.mark.usefixtures("monarchs")
async def test_restarted_worker_has_a_new_id():
    async with worker() as port, connected("a", f"127.0.0.1:{port}") as first:
        await first.monarch()
        assert await worker_id_at(f"127.0.0.1:{port}") == await worker_id_at(f"localhost:{port}") == first.id
        before = first.id
    async with worker() as port:
        assert await worker_id_at(f"127.0.0.1:{port}") != before
    with pytest.raises(ActorDiedError, match="no worker at"):
        await worker_id_at(f"127.0.0.1:{port}")


async def test_worker_announces_runs_that_come_and_go(monarchs: Monarchs):
    messages: asyncio.Queue[str] = asyncio.Queue()

    class Queued(Console):
        def message(self, text: str) -> None:
            messages.put_nowait(text)

    async with worker(Queued()) as port:
        one = await connect_to_worker("5f0c", f"127.0.0.1:{port}", 30.0, "alphabet")
        assert await messages.get() == "run alphabet has connected from 127.0.0.1"
        await one.monarch()
        one.close()
        monarchs.running[0].set()
        assert await messages.get() == "run alphabet has ended"

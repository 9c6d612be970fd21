"""Attaching and detaching of a run's hosts. Their workers and agents are fakes; the facts they report are real."""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("monarch", reason="needs the cpu or gpu extra")

from titan_rl.cluster.hosts.agent import Received, RunOnHost, new_pieces
from titan_rl.cluster.hosts.attached_hosts import Hosts
from titan_rl.cluster.hosts.preflight import Clocks, FactsRequest, HostFacts, HostNeeds, collect_facts
from titan_rl.cluster.liveness.heartbeat import HostMonitor, Report, WatchdogSettings, receive, send
from titan_rl.config.hosts import HostsConfig
from titan_rl.core.errors import ActorDiedError


class Endpoint:
    def __init__(self, function: Any) -> None:
        self.call_one = function


class FarHost:
    """A worker, and the agent that is spawned there."""

    def __init__(self, folder: Path, hostname: str) -> None:
        self.folder = folder
        self.hostname = hostname
        self.may_look = asyncio.Event()
        self.may_look.set()
        self.is_asked = asyncio.Event()
        self.may_prepare = asyncio.Event()
        self.may_prepare.set()
        self.is_named = asyncio.Event()
        self.problem: Exception | None = None
        self._beating: asyncio.Task[None] | None = None
        self.enter, self.look, self.prepare = Endpoint(self._enter), Endpoint(self._look), Endpoint(self._prepare)
        self.start_watchdog, self.new_output = Endpoint(self._start_watchdog), Endpoint(self._new_output)
        self.clean_up, self.clocks = Endpoint(self._clean_up), Endpoint(self._clocks)

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncGenerator[str]:
        """Start the worker, and yield its address."""
        async with await asyncio.start_server(self._meet, "127.0.0.1", 0) as worker:
            yield f"127.0.0.1:{worker.sockets[0].getsockname()[1]}"

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await receive(reader)
        send(writer, {"monarch": f"tcp://{self.hostname}:1"})
        await reader.read()
        writer.close()

    async def _enter(self) -> None:
        if self.problem is not None:
            raise self.problem

    async def _look(self, question: FactsRequest) -> HostFacts:
        self.is_asked.set()
        await self.may_look.wait()
        return replace(collect_facts(question), hostname=self.hostname)

    async def _clocks(self) -> Clocks:
        return Clocks.now()

    async def _prepare(self, run_dir: Path | None, *args: Any) -> RunOnHost:
        self.is_named.set()
        await self.may_prepare.wait()
        return RunOnHost(run_dir or self.folder, self.folder, None)

    async def _start_watchdog(self, settings: WatchdogSettings) -> Path:
        self._beating = asyncio.ensure_future(self._beat(settings))
        return self.folder

    async def _beat(self, settings: WatchdogSettings) -> None:
        _, writer = await asyncio.open_connection(settings.address, settings.port)
        send(writer, {"token": settings.token})
        for number in range(1000):
            send(writer, Report(number).message())
            await asyncio.sleep(0.1)

    async def _new_output(self, received: Received) -> Any:
        return new_pieces(self.folder, received)

    async def _clean_up(self) -> None:
        if self._beating is not None:
            self._beating.cancel()


class Supervisor:
    """Spawns the agents of hosts, in the order in which these are attached."""

    def __init__(self, *hosts: FarHost) -> None:
        self._hosts = {host.hostname: host for host in hosts}
        self._attached: dict[str, FarHost] = {}
        self._far = list(hosts)
        self.attach, self.spawn = Endpoint(self._attach), Endpoint(self._spawn)
        self.terminate = self.detach = Endpoint(self._end)

    async def _attach(self, key: str, worker: str) -> None:
        self._attached[key] = self._far.pop(0)

    async def _spawn(self, key: str, *args: Any) -> FarHost:
        return self._attached[key]

    async def _end(self, *args: Any) -> None: ...


@contextlib.asynccontextmanager
async def attaching(run_dir: Path, *far: FarHost) -> AsyncGenerator[tuple[Hosts, list[str]]]:
    """The hosts of a run, and the addresses of `far`, which may be attached."""
    (run_dir / "logs").mkdir(parents=True)
    async with contextlib.AsyncExitStack() as opened:
        monitor = opened.enter_context(HostMonitor("127.0.0.1", silence_s=5.0, lease_s=10.0))
        hosts = Hosts(Supervisor(*far), HostsConfig(), HostNeeds(run_dir, run_dir), monitor=monitor)
        opened.push_async_callback(hosts.close)
        yield hosts, [await opened.enter_async_context(host.listening()) for host in far]


async def test_hosts_joining_with_the_same_name_get_distinct_names(tmp_path: Path) -> None:
    far = [FarHost(tmp_path, "node"), FarHost(tmp_path, "node")]
    async with attaching(tmp_path / "run", *far) as (hosts, addresses):
        joining = [asyncio.ensure_future(hosts.attach([address])) for address in addresses]
        for one in far:
            one.may_prepare.clear()
        for one in far:
            await one.is_named.wait()
        for one in far:
            one.may_prepare.set()
        attached = await asyncio.gather(*joining)
        assert sorted(host.name for (host,) in attached) == sorted(hosts.names) == ["node", "node-2"]


async def test_single_host_rejoins_a_run_that_began_with_several(tmp_path: Path) -> None:
    async with attaching(tmp_path / "run", FarHost(tmp_path, "node")) as (hosts, addresses):
        hosts.config = HostsConfig(train=2, generate=3, play=3)
        assert [host.name for host in await hosts.attach(addresses)] == ["node"]


async def test_concurrent_joins_both_see_the_shared_run_folder(tmp_path: Path) -> None:
    slow, quick = FarHost(tmp_path, "slow"), FarHost(tmp_path, "quick")
    slow.may_look.clear()
    async with attaching(tmp_path / "run", slow, quick) as (hosts, addresses):
        first = asyncio.ensure_future(hosts.attach(addresses[:1]))
        await slow.is_asked.wait()
        await hosts.attach(addresses[1:])
        slow.may_look.set()
        (host,) = await first
        assert host.folders == {}, "it sees the run's folder"
    assert not (tmp_path / "run" / ".hosts").exists()


async def test_error_on_a_host_names_its_address(tmp_path: Path) -> None:
    far = FarHost(tmp_path, "full")
    far.problem = OSError(errno.ENOSPC, "No space left on device", "/tmp/titan_rl-run-1")
    async with attaching(tmp_path / "run", far) as (hosts, (address,)):
        with pytest.raises(ActorDiedError, match=rf"host at {address}: .*No space left.*titan_rl-run-1"):
            await hosts.attach([address])
        assert hosts.names == []


async def test_last_output_arrives_when_a_host_is_detached(tmp_path: Path) -> None:
    (logs := tmp_path / "there" / "logs").mkdir(parents=True)
    far = FarHost(tmp_path / "there", "there")
    async with attaching(tmp_path / "run", far) as (hosts, addresses):
        await hosts.attach(addresses)
        (logs / "generator-0.log").write_text("its last words\n")
        await hosts.detach("there")
        assert (tmp_path / "run" / "logs" / "generator-0.log").read_text() == "its last words\n"

"""Hosts that leave or cannot be used: their statuses and messages, and the cleanup on them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from background import HANG_S

pytest.importorskip("monarch", reason="needs the cpu or gpu extra")

from titan_rl.cluster.hosts.attached_hosts import Hosts
from titan_rl.cluster.hosts.elastic import ElasticHosts
from titan_rl.cluster.hosts.lifecycle import HostLifecycles, HostRecord, HostState
from titan_rl.cluster.hosts.preflight import HostNeeds
from titan_rl.cluster.liveness.heartbeat import HostMonitor, receive, send
from titan_rl.cluster.processes.remote_process import RemoteProcess
from titan_rl.config.hosts import HostsConfig
from titan_rl.core.errors import ActorDiedError, ConfigError


class Endpoint:
    def __init__(self, function: Callable[..., Awaitable[Any]]) -> None:
        self.call_one = function


class LeavingHosts:
    """Hosts that take time to leave."""

    config = HostsConfig()

    def __init__(self, *names: str) -> None:
        self.lifecycles = HostLifecycles()
        for number, name in enumerate(names or ("there",), 2):
            self.lifecycles.add(SimpleNamespace(name=name, worker=f"10.0.0.{number}:22222", worker_id="c81e"))
        self.may_end = asyncio.Event()
        self.notices: list[str] = []

    def notify(self, text: str) -> None:
        logging.getLogger("hosts").warning("%s", text)
        self.notices.append(text)

    def is_about_to_go(self, name: str) -> None:
        self.lifecycles.announce_leaving(self.record(name), "its worker got SIGTERM")

    def record(self, name: str) -> HostRecord:
        record = self.lifecycles.named(name)
        assert record is not None
        return record

    def lose(self, name: str, why: str) -> None:
        self.lifecycles.move(self.record(name), HostState.LOST, why)

    @property
    def names(self) -> list[str]:
        return [record.name for record in self.lifecycles.present]

    def __getitem__(self, name: str) -> Any:
        return self.record(name).host

    async def detach(self, name: str, why: str) -> None:
        self.lifecycles.move(self.record(name), HostState.LEFT, why)
        await self.may_end.wait()


class Processes:
    def __init__(self, hosts: LeavingHosts) -> None:
        self.hosts = hosts

    def names_by_host(self) -> dict[str, list[str]]:
        return {}

    async def leave(self, host: str, why: str) -> None: ...


async def test_drain_is_logged(caplog: pytest.LogCaptureFixture):
    hosts = LeavingHosts()
    notices = hosts.notices
    hosts.may_end.set()
    elastic = ElasticHosts(Processes(hosts))  # pyright: ignore[reportArgumentType]
    with caplog.at_level("WARNING"):
        await elastic.drain("there", "it was asked to")
    assert caplog.messages == notices == ["host there is drained: it was asked to"]


async def test_host_lost_while_draining_is_reported_once():
    hosts = LeavingHosts()
    notices = hosts.notices

    class Losing(Processes):
        async def leave(self, host: str, why: str) -> None:
            hosts.lose(host, "it fell silent")

    elastic = ElasticHosts(Losing(hosts))  # pyright: ignore[reportArgumentType]
    await elastic.drain("there", "it was asked to")
    assert notices == ["host there is lost: it fell silent"]
    assert [(host.name, host.state) for host in elastic.statuses()] == [("there", "gone")]


@pytest.mark.parametrize(
    ("state", "error"), [("left", "has left already: it was asked to"), ("gone", "is lost already: it fell silent")]
)
async def test_draining_an_absent_host_is_rejected_with_the_reason(state: str, error: str):
    hosts = LeavingHosts()
    hosts.may_end.set()
    elastic = ElasticHosts(Processes(hosts))  # pyright: ignore[reportArgumentType]
    if state == "left":
        await elastic.drain("there", "it was asked to")
    else:
        hosts.lose("there", "it fell silent")
    with pytest.raises(ConfigError, match=f"^host there {error}$"):
        await elastic.drain("there", "once more")
    with pytest.raises(ConfigError, match="there is no host 'nobody'"):
        await elastic.drain("nobody", "why not")


async def test_host_is_joining_until_its_processes_are_up(caplog: pytest.LogCaptureFixture):
    class Joining(LeavingHosts):
        config = HostsConfig(addresses=("10.0.0.2:22222", "10.0.0.3:22222"))

        async def attach(self, workers: list[str]) -> list[Any]:
            record = self.lifecycles.join(workers[0])
            record.name, record.host = "new", SimpleNamespace(name="new", worker=workers[0], worker_id="c81f")
            self.lifecycles.joined(record, HostState.STARTING)
            return [record.host]

    class Starting(Processes):
        async def join(self, host: str) -> list[str]:
            begun.set()
            await up.wait()
            return ["generator-7"]

    begun, up, hosts = asyncio.Event(), asyncio.Event(), Joining()
    notices = hosts.notices
    elastic = ElasticHosts(Starting(hosts))  # pyright: ignore[reportArgumentType]
    joining = asyncio.ensure_future(elastic.add("10.0.0.3:22222"))
    await begun.wait()
    states = {host.name: (host.state, host.reason) for host in elastic.statuses()}
    assert states == {"there": ("in the run", ""), "new": ("joining", "its processes start")}
    assert notices == ["host new at 10.0.0.3:22222 joins, and its processes start"]
    up.set()
    await joining
    assert [host.state for host in elastic.statuses()] == ["in the run", "in the run"]
    assert caplog.messages == notices
    assert notices[1:] == ["host new at 10.0.0.3:22222 has joined with generator-7"]


async def test_leaving_host_stays_listed():
    hosts = LeavingHosts()
    elastic = ElasticHosts(Processes(hosts))  # pyright: ignore[reportArgumentType]
    leaving = asyncio.ensure_future(elastic.drain("there", "asked to"))
    seen: list[str] = []
    while hosts.names or not seen:
        await asyncio.sleep(0)
        ((state, address),) = [(host.state, host.address) for host in elastic.statuses()]  # else it would join again
        assert address == "10.0.0.2:22222"
        seen.append(state)
    assert seen[-1] == "left"
    hosts.may_end.set()
    await leaving


def test_host_lost_at_start_is_listed():
    hosts = LeavingHosts()
    hosts.lifecycles.add(SimpleNamespace(name="other", worker="10.0.0.3:22222", worker_id="c81f"))
    hosts.lose("other", "it fell silent")
    elastic = ElasticHosts(Processes(hosts))  # pyright: ignore[reportArgumentType]
    states = [(host.name, host.address, host.state, host.reason) for host in elastic.statuses()]
    assert states[1:] == [("other", "10.0.0.3:22222", "gone", "it fell silent")]


def test_host_lost_before_it_was_named_is_listed_by_address():
    hosts = LeavingHosts()
    hosts.lifecycles.join_failed(hosts.lifecycles.join("10.0.0.4:22222"), "its worker has ended")
    elastic = ElasticHosts(Processes(hosts))  # pyright: ignore[reportArgumentType]
    states = [(host.name, host.address, host.state, host.reason) for host in elastic.statuses()]
    assert states[1:] == [("", "10.0.0.4:22222", "gone", "its worker has ended")]


async def test_worker_that_ends_during_attach_is_listed_as_gone(tmp_path: Path):
    async def ends(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert (await receive(reader))["run"]
        send(writer, {"monarch": ""})
        await writer.drain()
        writer.close()

    async def is_nobody(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    hosts = Hosts(Supervisor(), HostsConfig(), HostNeeds(tmp_path, tmp_path))
    for answer, reasons in ((is_nobody, []), (ends, ["its worker has ended"])):
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as worker:
            port = worker.sockets[0].getsockname()[1]
            with pytest.raises(ActorDiedError):
                await hosts.attach([f"127.0.0.1:{port}"])
        assert [status.reason for status in hosts.lifecycles.statuses() if status.state == "gone"] == reasons


async def test_attach_error_names_every_missing_worker(tmp_path: Path):
    hosts = Hosts(Supervisor(), HostsConfig(), HostNeeds(tmp_path, tmp_path))
    with pytest.raises(ActorDiedError, match=r"no worker at 127.0.0.1:1: .*; no worker at 127.0.0.1:2: "):
        await hosts.attach(["127.0.0.1:1", "127.0.0.1:2"], begins=True)


async def until_drained(notices: list[str], name: str) -> None:
    async with asyncio.timeout(HANG_S):
        while f"host {name} is drained: its worker got SIGTERM" not in notices:  # noqa: ASYNC110  no event to wait for
            await asyncio.sleep(0)


async def test_leaving_host_is_drained_even_if_announced_early():
    hosts = LeavingHosts("a", "b", "c")
    notices = hosts.notices
    hosts.may_end.set()
    hosts.is_about_to_go("a")
    elastic = ElasticHosts(Processes(hosts))  # pyright: ignore[reportArgumentType]
    await until_drained(notices, "a")
    hosts.is_about_to_go("b")
    await until_drained(notices, "b")
    assert {host.name: host.state for host in elastic.statuses()} == {"c": "in the run", "a": "left", "b": "left"}


@pytest.mark.looptime
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), ActorDiedError("it is gone")], ids=repr)
async def test_failed_drain_of_a_leaving_host_is_reported(error: Exception):
    class Failing(Processes):
        async def leave(self, host: str, why: str) -> None:
            raise error

    hosts = LeavingHosts("a", "b")
    notices = hosts.notices
    elastic = ElasticHosts(Failing(hosts))  # pyright: ignore[reportArgumentType]
    hosts.is_about_to_go("a")
    await asyncio.sleep(1)  # virtual: all that can happen has
    (line,) = notices
    assert line.startswith("host a is about to shut down (its worker got SIGTERM), and cannot be drained: ")
    assert str(error) in line
    assert [host.state for host in elastic.statuses()] == ["in the run", "in the run"]


@pytest.mark.looptime
async def test_run_ends_once_when_all_hosts_are_leaving():
    hosts, ends = LeavingHosts("a", "b", "c"), list[str]()
    notices = hosts.notices
    elastic = ElasticHosts(Processes(hosts), lambda: ends.append("now"))  # pyright: ignore[reportArgumentType]
    hosts.is_about_to_go("a")
    while hosts.names != ["b", "c"]:  # noqa: ASYNC110  no event to wait for
        await asyncio.sleep(0)
    hosts.is_about_to_go("b")
    assert ends == []
    hosts.is_about_to_go("c")
    hosts.may_end.set()
    await asyncio.sleep(1)  # virtual: all that can happen has
    assert ends == ["now"]
    assert notices == ["all hosts of the run were asked to leave (its worker got SIGTERM), so the run ends"]
    assert {host.name: host.state for host in elastic.statuses()} == {"b": "in the run", "c": "in the run", "a": "left"}


async def test_all_leaving_hosts_are_drained_if_others_may_join():
    hosts = LeavingHosts("a", "b")
    notices = hosts.notices
    hosts.may_end.set()
    elastic = ElasticHosts(Processes(hosts))  # pyright: ignore[reportArgumentType]
    for name in ("a", "b"):
        hosts.is_about_to_go(name)
    for name in ("a", "b"):
        await until_drained(notices, name)
    assert {host.state for host in elastic.statuses()} == {"left"}


class Supervisor:
    def __init__(self) -> None:
        self.running: set[str] = set()
        self.scratch: set[str] = set()
        self.attach, self.spawn = Endpoint(self._attach), Endpoint(self._spawn)
        self.terminate, self.detach = Endpoint(self._terminate), Endpoint(self._detach)

    async def _attach(self, key: str, worker: str) -> None: ...

    async def _detach(self, key: str) -> None: ...

    async def _spawn(self, key: str, *args: Any) -> Any:
        self.running.add(key)
        return SimpleNamespace(
            enter=Endpoint(self._enter), look=Endpoint(self._refuse), clean_up=Endpoint(self._clean_up)
        )

    async def _enter(self) -> None:
        self.scratch |= self.running

    async def _refuse(self, question: object) -> None:
        raise ActorDiedError("no room")

    async def _clean_up(self) -> None:
        assert self.running  # the agent still runs
        self.scratch.clear()

    async def _terminate(self, keys: tuple[str, ...]) -> None:
        self.running.difference_update(keys)


async def answers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Serve as a worker until the run disconnects."""
    assert (await receive(reader))["run"]
    send(writer, {"monarch": "tcp://127.0.0.1:1"})
    await reader.read()
    writer.close()


async def test_failed_attach_leaves_nothing_on_the_host(tmp_path: Path):
    supervisor = Supervisor()
    hosts = Hosts(supervisor, HostsConfig(), HostNeeds(tmp_path, tmp_path))
    async with await asyncio.start_server(answers, "127.0.0.1", 0) as worker:
        port = worker.sockets[0].getsockname()[1]
        with pytest.raises(ActorDiedError, match="no room"):
            await hosts.attach([f"127.0.0.1:{port}"])
    assert supervisor.running == supervisor.scratch == set()
    assert hosts.names == []


class Owner:
    def __init__(self, remote: RemoteProcess) -> None:
        self._remote = remote

    def host_lost(self, name: str, reason: str) -> None:
        self._remote.end(reason, excused=True)

    def host_leaving(self, name: str, reason: str) -> None: ...


async def test_processes_of_a_lost_host_end_excused() -> None:
    remote = RemoteProcess("trainer")
    with HostMonitor("127.0.0.1", silence_s=3, lease_s=15) as monitor:
        watcher = monitor.expect("h1", Owner(remote))
        remote.watch([4242], watcher)
        watcher.lose("no heartbeat")
    assert remote.reason == "no heartbeat"
    assert remote.excused
    with pytest.raises(ActorDiedError, match="trainer died: no heartbeat") as caught:
        await remote.call(None)
    assert caught.value.excused, "a caller that waits for its start can tell"

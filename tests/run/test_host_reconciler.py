"""Host reconciler: hosts join and leave as files and requests say, in virtual time, with fake hosts and real files."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import stat
from pathlib import Path
from typing import Any

import msgspec
import pytest
from background import in_background

from titan_rl.cluster.hosts.elastic import ASK_S, MISSES, RETRY_S, HostReconciler, ProvidedHosts
from titan_rl.cluster.hosts.host_files import HostFiles, HostRequest, HostStates, describe
from titan_rl.cluster.hosts.lifecycle import HostLifecycles, HostState, HostStatus
from titan_rl.core.errors import ActorDiedError, ConfigError, TitanRLError
from titan_rl.core.run_files import RunStatus
from titan_rl.run.status import status_kept


class Hosts:
    """Fake elastic hosts: only the addresses in `up` can join."""

    def __init__(self, *up: str) -> None:
        self.up = set(up)
        self.lifecycles = HostLifecycles()
        self.tries: list[str] = []
        self.restarted: set[str] = set()  # addresses with a restarted worker
        self.join_s = 0.0
        self.messages: list[str] = []

    def notify(self, text: str) -> None:
        logging.getLogger("hosts").warning("%s", text)
        self.messages.append(text)

    @property
    def inside(self) -> dict[str, str]:
        """State of each host, by address."""
        return {host.address: host.state for host in self.statuses()}

    def statuses(self) -> list[HostStatus]:
        return self.lifecycles.statuses()

    def take_silences(self) -> dict[str, float]:
        return dict.fromkeys((host.name for host in self.statuses()), 0.25)

    async def add(self, address: str) -> None:
        self.tries.append(address)
        record = self.lifecycles.join(address)
        if self.join_s:
            await asyncio.sleep(self.join_s)
        if address not in self.up:
            self.lifecycles.join_failed(record)
            raise ActorDiedError("no worker answers")
        record.name = f"h{address.split('.')[3][0]}"
        self.lifecycles.joined(record, HostState.UP)

    def lose(self, address: str) -> None:
        self.lifecycles.move(self.lifecycles.of(address), HostState.LOST, "silent")

    async def is_new(self, address: str) -> bool:
        return address in self.restarted

    async def drain(self, name: str, why: str) -> None:
        record = self.lifecycles.named(name)
        if record is None:
            raise ConfigError(f"there is no host {name!r}")
        self.lifecycles.move(record, HostState.DRAINING, why)
        self.lifecycles.move(record, HostState.LEFT, why)


H1, H2 = "10.0.0.1:22222", "10.0.0.2:22222"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "config.toml").write_text("")
    return tmp_path


@pytest.fixture
def running_status(monkeypatch: pytest.MonkeyPatch) -> None:
    status = RunStatus("running", began=0.0)
    monkeypatch.setattr("titan_rl.cluster.hosts.host_files.read_status", lambda folder: status)


def reconciler_of(
    run_dir: Path, hosts: Hosts, *addresses: str, file: Path | None = None
) -> tuple[HostReconciler, list[str]]:
    elastic: Any = hosts
    return HostReconciler(elastic, HostFiles(run_dir), addresses, file), hosts.messages


@pytest.mark.looptime
@pytest.mark.usefixtures("running_status")
async def test_lost_host_rejoins_once_it_answers(run_dir: Path, caplog: pytest.LogCaptureFixture):
    hosts = Hosts(H1)
    reconciler, messages = reconciler_of(run_dir, hosts, H1, "10.0.0.2")
    async with in_background(reconciler.watch()):
        await asyncio.sleep(10 * RETRY_S)
        assert hosts.inside == {H1: "in the run"}
        assert caplog.messages == messages == [f"the host at {H2} cannot join: no worker answers"]
        assert 9 <= hosts.tries.count(H2) <= 11
        hosts.up.add(H2)
        hosts.lose(H1)
        await asyncio.sleep(2 * RETRY_S)
    assert hosts.inside == {H1: "in the run", H2: "in the run"}
    assert [host.name for host in HostFiles(run_dir).states().hosts] == ["h1", "h2"]


async def test_host_lost_as_the_run_ends_is_recorded(run_dir: Path):
    hosts = Hosts(H1, H2)
    for address in (H1, H2):
        await hosts.add(address)
    reconciler, _ = reconciler_of(run_dir, hosts, H1, H2)
    watching = asyncio.ensure_future(reconciler.watch())
    await asyncio.sleep(0)
    hosts.lose(H2)
    watching.cancel()
    await asyncio.wait([watching])
    states = HostFiles(run_dir).states()
    assert [(event.host, event.what) for event in states.events] == [("h2", "lost")]
    assert states.counts == {"joined": 0, "left": 0, "lost": 1}


@pytest.mark.looptime
@pytest.mark.usefixtures("running_status")
@pytest.mark.parametrize("by_command", [True, False], ids=["by command", "by its worker"])
async def test_drained_host_rejoins_with_a_restarted_worker(run_dir: Path, *, by_command: bool):
    hosts = Hosts(H1, H2)
    reconciler, _ = reconciler_of(run_dir, hosts, H1, H2)
    async with in_background(reconciler.watch()):
        await asyncio.sleep(1)
        if by_command:
            with (run_dir / "hosts.jsonl").open("ab") as file:
                file.write(b'{"id": "a", "do": "drain", "what": "h1"}\n')
        else:
            await hosts.drain("h1", "its worker got SIGTERM")
        await asyncio.sleep(10 * RETRY_S)
        assert hosts.inside == {H1: "left", H2: "in the run"}, "its worker is the same"
        hosts.restarted.add(H1)
        await asyncio.sleep(2 * RETRY_S)
    assert hosts.inside == {H1: "in the run", H2: "in the run"}


@pytest.mark.looptime
async def test_address_file_is_followed(run_dir: Path):
    file = run_dir / "addresses"
    file.write_text("10.0.0.1  # the first\n\n10.0.0.2 10.0.0.3\nhttp://a\n0.0.0.0\n")
    hosts = Hosts(H1, H2)
    reconciler, messages = reconciler_of(run_dir, hosts, file=file)
    async with in_background(reconciler.watch()):
        await asyncio.sleep(1)
        assert hosts.inside == {H1: "in the run"}
        file.write_text(f"{H2}\n")
        await asyncio.sleep(1)
        assert hosts.inside == {H1: "left", H2: "in the run"}
        file.unlink()
        await asyncio.sleep(10 * RETRY_S)
    assert hosts.inside == {H1: "left", H2: "in the run"}
    assert messages == []


@pytest.mark.looptime
async def test_hosts_follow_the_provider_list(run_dir: Path, caplog: pytest.LogCaptureFixture):
    answers: dict[str, object] = {"current": [H1]}

    async def current() -> list[str]:
        match answers["current"]:
            case list() as addresses:
                return addresses
            case error:
                assert isinstance(error, Exception)
                raise error

    hosts, provided = Hosts(H1, H2), ProvidedHosts([H1], current)
    elastic: Any = hosts
    reconciler = HostReconciler(elastic, HostFiles(run_dir), [H1], None, None, provided)

    async def answer(value: object, times: float) -> dict[str, str]:
        """Return the state of each host after the provider has given this answer `times` times."""
        answers["current"] = value
        await asyncio.sleep(times * ASK_S)
        return dict(hosts.inside)

    here = "in the run"
    async with in_background(reconciler.watch()), in_background(provided.watch()):
        assert await answer([H1, "10.0.0.2"], 1.5) == {H1: here, H2: here}
        assert await answer(OSError("the resolver does not answer"), 5) == {H1: here, H2: here}
        assert await answer([H1], MISSES - 1) == {H1: here, H2: here}
        assert await answer([H1, H2], 1) == {H1: here, H2: here}
        assert await answer([H2], MISSES + 1) == {H1: "left", H2: here}
        assert await answer([H1, H2], 1.5) == {H1: here, H2: here}, "a machine that is listed again rejoins"
    assert "the provider's list of hosts cannot be read: OSError: the resolver does not answer" in caplog.text


@pytest.mark.looptime
@pytest.mark.parametrize("first", ["file", "provider"])
async def test_host_stays_until_both_lists_drop_it(run_dir: Path, first: str):
    (file := run_dir / "addresses").write_text(H1)
    listed = {"file": [H1], "provider": [H1]}

    async def current() -> list[str]:
        return listed["provider"]

    hosts, provided = Hosts(H1), ProvidedHosts([H1], current)
    elastic: Any = hosts
    reconciler = HostReconciler(elastic, HostFiles(run_dir), [H1], file, None, provided)

    async def drop(name: str) -> str:
        listed[name] = []
        file.write_text("\n".join(listed["file"]))
        await asyncio.sleep((MISSES + 1) * ASK_S)
        return hosts.inside[H1]

    async with in_background(reconciler.watch()), in_background(provided.watch()):
        await asyncio.sleep(1)
        assert await drop(first) == "in the run"
        hosts.lose(H1)
        await asyncio.sleep(2 * RETRY_S)
        assert hosts.inside[H1] == "in the run", "it is still wanted"
        assert await drop("provider" if first == "file" else "file") == "left"


async def request(run_dir: Path, reconciler: HostReconciler, do, what: str) -> None:
    """Send a request like `titan-rl hosts` does, while the reconciler looks for requests."""
    asking = asyncio.ensure_future(asyncio.to_thread(HostFiles(run_dir).ask, do, what, 30.0))
    while not asking.done():
        reconciler.look()
        await asyncio.sleep(0.01)
    await asking


@pytest.mark.usefixtures("running_status")
async def test_host_requests_are_answered(run_dir: Path):
    hosts = Hosts(H1)
    reconciler, _ = reconciler_of(run_dir, hosts)
    await request(run_dir, reconciler, "add", "10.0.0.1")
    assert describe(HostFiles(run_dir).states()).splitlines() == [
        "host  address         state       processes",
        "h1    10.0.0.1:22222  in the run",
        "since the run began: 1 joined, 0 left, 0 lost",
    ]
    with pytest.raises(ConfigError, match="no worker answers"):
        await request(run_dir, reconciler, "add", "10.0.0.2")
    with pytest.raises(ConfigError, match="there is no host 'h7'"):
        await request(run_dir, reconciler, "drain", "h7")
    await request(run_dir, reconciler, "drain", "h1")
    assert hosts.inside == {H1: "left"}
    for _ in range(3):
        reconciler.look()
        await asyncio.sleep(0)
    assert hosts.inside == {H1: "left"}


def test_ended_run_rejects_host_requests(run_dir: Path):
    with status_kept(run_dir, begins=True):
        pass
    with pytest.raises(ConfigError, match=f"the run in {run_dir} has ended: it finished$"):
        HostFiles(run_dir).ask("drain", "h1", 1.0)
    with pytest.raises(ConfigError, match="does not list its hosts"):
        HostFiles(run_dir).states()
    HostFiles(run_dir).write(HostStates([HostStatus("h1", H1, "in the run")], counts={"joined": 0, "lost": 2}))
    assert not HostFiles(run_dir).is_running
    assert describe(HostFiles(run_dir).states()).splitlines()[1:] == [
        "h1    10.0.0.1:22222  in the run",
        "since the run began: 0 joined, 2 lost",
    ]
    assert not (run_dir / "hosts.jsonl").exists()


@pytest.mark.parametrize(("state", "how"), [("stopped", "it was stopped"), ("failed", "it failed")])
@pytest.mark.parametrize("command", ["train", "sft"])
def test_stopped_run_error_names_the_resume_command(run_dir: Path, state: Any, how: str, command: str):
    RunStatus(state, began=0.0).write(run_dir)
    if command == "sft":
        (run_dir / "supervised.json").touch()
    with pytest.raises(ConfigError) as refused:
        HostFiles(run_dir).ask("drain", "h1", 1.0)
    assert str(refused.value) == (
        f"the run in {run_dir} has ended: {how}; titan-rl {command} --resume {run_dir} continues it"
    )


@pytest.mark.usefixtures("running_status")
async def test_immediate_refusal_does_not_report_waiting(run_dir: Path):
    reconciler, _ = reconciler_of(run_dir, Hosts(H1))
    waits: list[str] = []
    asking = asyncio.ensure_future(
        asyncio.to_thread(HostFiles(run_dir).ask, "drain", "h9", 30.0, on_wait=lambda: waits.append("h9"))
    )
    while not asking.done():
        reconciler.look()
        await asyncio.sleep(0.01)
    with pytest.raises(ConfigError, match="there is no host 'h9'"):
        await asking
    assert waits == []


@pytest.mark.usefixtures("running_status")
async def test_starting_run_clears_old_states_and_answers_later(run_dir: Path):
    HostFiles(run_dir).write(HostStates([HostStatus("h9", H1, "in the run")]))
    (files := HostFiles(run_dir)).begin()
    with pytest.raises(ConfigError, match="they are listed once its processes have started"):
        HostFiles(run_dir).states()
    with pytest.raises(TitanRLError, match="did not answer within 0 s"):
        HostFiles(run_dir).ask("add", "10.0.0.1", 0.0)
    hosts = Hosts(H1)
    elastic: Any = hosts
    reconciler = HostReconciler(elastic, files, (), None)
    reconciler.look()
    await asyncio.sleep(0)
    assert hosts.inside == {H1: "in the run"}


@pytest.mark.usefixtures("running_status")
def test_host_list_waits_until_the_processes_have_started(run_dir: Path):
    (files := HostFiles(run_dir)).begin()
    states = HostStates([HostStatus("h1", H1, "in the run")])
    waited: list[str] = []

    def starts() -> None:
        waited.append("waits")
        files.write(states)

    assert HostFiles(run_dir).states(30.0, starts) == states
    assert HostFiles(run_dir).states(30.0, starts) == states
    assert waited == ["waits"]


@pytest.mark.usefixtures("running_status")
@pytest.mark.parametrize("mode", [0o700, 0o755])
def test_request_file_mode_follows_the_run_directory(run_dir: Path, mode: int):
    run_dir.chmod(mode)
    before = os.umask(0o022)
    try:
        with pytest.raises(TitanRLError, match="did not answer within 0 s"):
            HostFiles(run_dir).ask("drain", "h1", 0.0)
    finally:
        os.umask(before)
    assert stat.S_IMODE((run_dir / "hosts.jsonl").stat().st_mode) == mode & 0o644


def test_partial_request_line_is_read_once_complete(run_dir: Path):
    files = HostFiles(run_dir)
    with (run_dir / "hosts.jsonl").open("ab") as file:
        file.write(b'{"id": "a", "do": "add", "wh')
        file.flush()
        assert files.new_requests() == []
        file.write(b'at": "10.0.0.1"}\nnonsense\n{"id": "b", "do": "drain", "what": "h1"}\n')
    assert files.new_requests() == [HostRequest("a", "add", "10.0.0.1"), HostRequest("b", "drain", "h1")]
    assert files.new_requests() == []


@pytest.mark.looptime
async def test_full_disk_is_reported_once_and_the_run_continues(run_dir: Path, monkeypatch: pytest.MonkeyPatch):
    is_full = True

    def replace(path: Path, target: Path) -> Path:
        if is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return before(path, target)

    before = Path.replace
    monkeypatch.setattr(Path, "replace", replace)
    hosts = Hosts(H1)
    reconciler, messages = reconciler_of(run_dir, hosts, H1)
    async with in_background(reconciler.watch()) as watching:
        await asyncio.sleep(1)
        assert not watching.done()
        assert hosts.inside == {H1: "in the run"}
        assert [text.partition(": ")[0] for text in messages] == [
            "the list of hosts cannot be written at the moment, and the run continues",
        ]
        is_full = False
        await asyncio.sleep(1)
    assert (run_dir / "hosts.json").exists()


@pytest.mark.looptime
async def test_failed_join_reports_its_error(run_dir: Path):
    class Full(Hosts):
        async def add(self, address: str) -> None:
            raise OSError(errno.ENOSPC, "no room on that host")

    reconciler, messages = reconciler_of(run_dir, Full(), H1)
    with HostFiles(run_dir)._requests.open("ab") as file:  # pyright: ignore[reportPrivateUsage]
        file.write(b'{"id": "a", "do": "add", "what": "10.0.0.2"}\n')
    async with in_background(reconciler.watch()):
        await asyncio.sleep(2 * RETRY_S)
    assert messages == [f"the host at {H1} cannot join: OSError: [Errno 28] no room on that host"]
    states = msgspec.json.decode((run_dir / "hosts.json").read_bytes(), type=HostStates)
    assert states.answers == {"a": "OSError: [Errno 28] no room on that host"}


@pytest.mark.looptime
async def test_address_removed_during_its_join_is_drained_afterwards(run_dir: Path):
    (file := run_dir / "addresses").write_text(H1)
    hosts = Hosts(H1)
    hosts.join_s = 20.0
    reconciler, _ = reconciler_of(run_dir, hosts, file=file)
    async with in_background(reconciler.watch()):
        await asyncio.sleep(10)
        file.write_text("")
        await asyncio.sleep(20)
        assert hosts.inside == {H1: "left"}
        file.write_text(H1)
        await asyncio.sleep(40)
    assert hosts.inside == {H1: "in the run"}


@pytest.mark.looptime
@pytest.mark.usefixtures("running_status")
async def test_lost_host_is_retried_even_after_a_drain_request(run_dir: Path, monkeypatch: pytest.MonkeyPatch):
    hosts = Hosts(H1, H2)
    reconciler, _ = reconciler_of(run_dir, hosts, H1, H2)

    async def refuse(name: str, why: str) -> None:
        raise ConfigError(f"host {name} is lost already")

    monkeypatch.setattr(hosts, "drain", refuse)
    async with in_background(reconciler.watch()):
        await asyncio.sleep(2 * RETRY_S)
        hosts.up.discard(H1)
        hosts.lose(H1)
        with (run_dir / "hosts.jsonl").open("ab") as file:
            file.write(b'{"id": "a", "do": "drain", "what": "h1"}\n')
        await asyncio.sleep(2 * RETRY_S)
        assert HostFiles(run_dir).states().answers == {"a": "host h1 is lost already"}
        hosts.up.add(H1)
        await asyncio.sleep(2 * RETRY_S)
    assert hosts.inside[H1] == "in the run"

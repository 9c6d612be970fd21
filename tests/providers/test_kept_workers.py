"""Workers run by local commands: they end with the block, and failed ones are restarted."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from background import HANG_S
from providers.fakes import worker_command

from titan_rl.cluster.providers import host_worker_commands
from titan_rl.cluster.providers.host_worker_commands import KeptWorkers, kept_workers, tethered
from titan_rl.cluster.providers.spec import ChangingWorkers
from titan_rl.core.console import LOG, Console, ConsoleLines
from titan_rl.core.errors import ProviderError

WHEN_THERE = """
import os, signal, sys
if not os.path.exists(sys.argv[-1]):
    sys.exit("no route to host")
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
print("listening on 10.0.0.2:6", flush=True)
print(os.getpid(), flush=True)
signal.pause()
"""
"""A worker on a host that is reachable while a file exists."""


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_worker_commands, "FIRST_WAIT_S", 0.02)
    monkeypatch.setattr(host_worker_commands, "MOST_WAIT_S", 0.05)


def listening(tmp_path: Path, *addresses: str, program: str | None = None) -> list[tuple[str, list[str]]]:
    command = worker_command(tmp_path, *([program] if program else [])).split()
    return [(f"host{i}", tethered([*command, "--listen", address])) for i, address in enumerate(addresses)]


def on_absent_host(tmp_path: Path) -> tuple[str, list[str]]:
    """Worker on the host `comes`, which is reachable once the file `there` exists."""
    return "comes", tethered([sys.executable, "-S", "-c", WHEN_THERE, str(tmp_path / "there")])


async def test_workers_run_for_the_length_of_the_block(tmp_path: Path) -> None:
    console = ConsoleLines()
    commands = listening(tmp_path, "10.0.0.1:5", "10.0.0.2:6")
    async with kept_workers(commands, tmp_path, console, HANG_S) as kept:
        assert isinstance(kept, ChangingWorkers)
        assert list(kept) == await kept.current() == ["10.0.0.1:5", "10.0.0.2:6"]
    log = (tmp_path / "worker-host1.log").read_text().splitlines()
    assert log == ["titan-rl: listening on 10.0.0.2:6", "got SIGTERM"]
    assert console == []


async def test_failed_start_error_quotes_the_last_output(tmp_path: Path) -> None:
    fails = "print('warming up')\nraise SystemExit('no such interface')"
    failing = [(name, [sys.executable, "-S", "-c", fails]) for name in ("host0", "host1")]
    with pytest.raises(ProviderError, match=r"host1 has ended with code 1: no such interface; its log: .*worker-host1"):
        async with kept_workers(failing, tmp_path, LOG, HANG_S):
            pytest.fail("it began")


async def test_worker_that_never_listens_times_out(tmp_path: Path) -> None:
    commands = listening(tmp_path, "10.0.0.1:5", program="import signal\nsignal.pause()\n")
    with pytest.raises(ProviderError, match=r"no worker listens on host0 after 0.1 s; see .*/worker-host0.log"):
        async with kept_workers(commands, tmp_path, LOG, wait_s=0.1):
            pytest.fail("it began")


async def test_missing_command_is_named(tmp_path: Path) -> None:
    with pytest.raises(ProviderError, match="no-such-ssh cannot be started: No such file"):
        async with kept_workers([("host", ["no-such-ssh"])], tmp_path, LOG, HANG_S):
            pytest.fail("it began")


class Kept(Console):
    """Workers of a present and of an absent host, and their messages."""

    def __init__(self, tmp_path: Path) -> None:
        self.console = ConsoleLines()
        self._changed = asyncio.Event()
        self.workers = KeptWorkers(tmp_path, self)
        for host, words in (*listening(tmp_path, "10.0.0.1:5"), on_absent_host(tmp_path)):
            self.workers.keep(host, words)

    def warning(self, text: str) -> None:
        self.console.append(text)
        self._changed.set()

    async def wait_for(self, text: str) -> None:
        """Wait for a message that contains `text`, then forget all messages."""
        async with asyncio.timeout(HANG_S):
            while not any(text in line for line in self.console):
                self._changed.clear()
                await self._changed.wait()
        self.console.clear()

    async def __aenter__(self) -> Kept:
        await self.workers.begin(HANG_S)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.workers.close()


async def test_host_absent_at_start_gets_its_worker_later(tmp_path: Path) -> None:
    async with Kept(tmp_path) as kept:
        assert list(kept.workers) == await kept.workers.current() == ["10.0.0.1:5"]
        await kept.wait_for(
            "the run starts without comes, and will try it again: the worker on comes has ended with code 1"
        )
        (tmp_path / "there").touch()
        await kept.wait_for("a worker listens on comes again")
        assert await kept.workers.current() == ["10.0.0.1:5", "10.0.0.2:6"]
        assert list(kept.workers) == ["10.0.0.1:5"], "the workers at the start"


async def test_failed_worker_is_restarted_when_its_host_returns(tmp_path: Path) -> None:
    (there := tmp_path / "there").touch()
    async with Kept(tmp_path) as kept:
        assert list(kept.workers) == ["10.0.0.1:5", "10.0.0.2:6"]
        there.unlink()
        os.kill(await pid_in(tmp_path), signal.SIGKILL)
        await kept.wait_for("the worker on comes has ended with code -9")
        assert await kept.workers.current() == ["10.0.0.1:5"]
        await kept.wait_for("has ended with code 1: no route to host")
        there.touch()
        await kept.wait_for("a worker listens on comes again")
        assert len(await kept.workers.current()) == 2


async def test_repeated_failure_is_reported_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_worker_commands, "FIRST_WAIT_S", 0.001)
    async with Kept(tmp_path) as kept:
        await until(lambda: (tmp_path / "worker-comes.log").read_text().count("no route") >= 4)
        assert [line for line in kept.console if "no route" in line] == kept.console[:1]


async def test_worker_ended_by_sigterm_is_not_restarted(tmp_path: Path) -> None:
    (tmp_path / "there").touch()
    async with Kept(tmp_path) as kept:
        os.kill(await pid_in(tmp_path), signal.SIGTERM)
        await kept.wait_for("the worker on comes has ended as requested, and is not restarted")
        assert await kept.workers.current() == ["10.0.0.1:5"]


async def test_releasing_a_host_ends_its_worker(tmp_path: Path) -> None:
    async with Kept(tmp_path) as kept:
        kept.workers.release(["host0"])
        assert await kept.workers.current() == []
        assert kept.workers.hosts == {"comes"}
        await until(lambda: (tmp_path / "worker-host0.log").read_text().endswith("got SIGTERM\n"))
        assert not any("host0" in line for line in kept.console)


async def pid_in(tmp_path: Path) -> int:
    """Pid of the worker on the host `comes`, which it prints after its address."""
    log = tmp_path / "worker-comes.log"
    await until(lambda: len(log.read_text().splitlines()) > 1)
    return int(log.read_text().splitlines()[1])


async def until(done: Callable[[], bool]) -> None:
    async with asyncio.timeout(HANG_S):
        while not done():  # noqa: ASYNC110  polls a file
            await asyncio.sleep(0.01)

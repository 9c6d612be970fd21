"""Hosts that are cut off, die, join and leave while their generators answer. The generators are scripted; the hosts,
their links and their processes are real."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from pathlib import Path

import pytest
from hosts.namespaces import PROJECT, HostProcess, Namespaces
from hosts.scripted import TESTS

LIMIT_S = 40.0
GIVEN_UP_S = (
    12.0  # a lease of 4 s, and what a loaded machine takes; what carries the calls would take more than a minute
)
END_S = 15.0  # less than is waited for a process to stop: nobody waits for those of hosts that are gone
COUNT, TOKENS = 12, 1500

PROGRAM = """
import asyncio, fcntl, json, sys
from pathlib import Path
from hosts.scripted import *
from titan_rl.config.hosts import HostsConfig
from titan_rl.run.hosts.requests import HostFiles
from titan_rl.run.parts import watcher
from titan_rl.run.status import noted

def say(text):
    print(text, flush=True)

async def main():
    hosts = HostsConfig(addresses=tuple(sys.argv[2:]), generate=3, lease_s=4, drain_s=20)
    settings, folder = config(sys.argv[2:], hosts=hosts), Path(sys.argv[1])
    (folder / "config.toml").write_text("")
    lock = (folder / "lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    async with generators(settings, folder) as (processes, router):
        status = noted(folder, begins=True)
        status.__enter__()
        watching = asyncio.ensure_future(watcher(settings, HostFiles(folder), processes, router, say)())
        say("ready")
        asking = None
        while words := (await asyncio.to_thread(sys.stdin.readline)).split():
            match words:
                case ["ask", count, tokens]:
                    asking = asyncio.ensure_future(ask(router, int(count), int(tokens)))
                    while sum(len(so_far.token_ids) for so_far in router.tokens_so_far().values()) < int(count):
                        await asyncio.sleep(0.01)
                    say("asked")
                case ["answers"]:
                    say("answers " + json.dumps(await asking))
                case ["pids"]:
                    remotes = {replica.name: replica.remote.pids for replica in processes.opened}
                    say("pids " + json.dumps({name: list(remotes[name]) for name in sorted(remotes)}))
                case ["serving"]:
                    say("serving " + " ".join(sorted(replica.name for replica in router.replicas if replica.serving)))
        watching.cancel()
asyncio.run(main())
"""


class Run:
    """A controller that does what it is told, a line each, and says what happens."""

    def __init__(self, folder: Path, hosts: Namespaces) -> None:
        self.folder = folder
        self.lines: list[str] = []
        self._said = queue.SimpleQueue[str]()
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(folder), *[host.worker_address for host in hosts]],
            env={**os.environ, "PYTHONPATH": f"{TESTS}{os.pathsep}{PROJECT}"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=PROJECT,
        )
        threading.Thread(target=self._read, daemon=True).start()

    def tell(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{text}\n")
        self.process.stdin.flush()

    def hears(self, *texts: str) -> str:
        """The first line from now on that has all of these."""
        deadline = time.monotonic() + LIMIT_S
        while (left_s := deadline - time.monotonic()) > 0 and (line := self._next(left_s)):
            self.lines.append(line.strip())
            if all(text in line for text in texts):
                return line.strip()
        raise AssertionError(f"it has not said {texts}:\n" + "\n".join(self.lines))

    def _next(self, limit_s: float) -> str:
        with contextlib.suppress(queue.Empty):
            return self._said.get(timeout=limit_s)
        return ""

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._said.put(line)
        self._said.put("")

    def asked(self, text: str) -> str:
        """What it answers to a word of its."""
        self.tell(text)
        return self.hears(f"{text} ").removeprefix(f"{text} ")


@pytest.fixture(scope="module")
def run(hosts: Namespaces, workers: list[HostProcess], tmp_path_factory: pytest.TempPathFactory) -> Generator[Run]:
    (folder := tmp_path_factory.mktemp("run")).mkdir(exist_ok=True)
    run = Run(folder, hosts)
    run.hears("ready")
    yield run
    assert run.process.stdin is not None
    run.process.stdin.close()
    run.process.wait(END_S)
    assert run.process.returncode == 0


@pytest.fixture(scope="module")
def undisturbed(run: Run) -> str:
    run.tell(f"ask {COUNT} {TOKENS}")
    return run.asked("answers")


def test_two_seconds_without_a_link_cost_nothing(run: Run, hosts: Namespaces, undisturbed: str) -> None:
    before = run.asked("pids")
    run.tell(f"ask {COUNT} {TOKENS}")
    run.hears("asked")
    hosts[1].link_down()
    time.sleep(2.0)
    hosts[1].link_up()
    assert run.asked("answers") == undisturbed
    assert run.asked("pids") == before
    assert run.asked("serving") == "generator-0 generator-1 generator-2"


def test_a_host_that_is_cut_off_is_given_up_ends_its_processes_and_joins_again_empty(
    run: Run, hosts: Namespaces, undisturbed: str
) -> None:
    run.tell(f"ask {COUNT} {TOKENS}")
    run.hears("asked")
    hosts[1].link_down()
    cut = time.monotonic()
    run.hears(f"host {hosts[1].name} is lost: nothing has been heard of host {hosts[1].name} for 3 s")
    assert time.monotonic() - cut < GIVEN_UP_S
    assert run.asked("answers") == undisturbed
    while engines_of(hosts, 1):  # by itself: nothing reaches it
        assert time.monotonic() - cut < LIMIT_S
        time.sleep(0.1)
    hosts[1].link_up()
    run.hears(f"host {hosts[1].name} at {hosts[1].worker_address} has joined with generator-")
    assert run.asked("serving") == "generator-0 generator-1 generator-2"


def test_a_machine_that_dies_and_starts_again_is_taken_in_by_the_same_address(
    run: Run, hosts: Namespaces, undisturbed: str, tmp_path: Path
) -> None:
    run.tell(f"ask {COUNT} {TOKENS}")
    run.hears("asked")
    hosts[2].kill()
    killed = time.monotonic()
    run.hears(f"host {hosts[2].name} is lost")
    assert time.monotonic() - killed < GIVEN_UP_S
    assert run.asked("answers") == undisturbed
    hosts[2].start()
    hosts[2].start_worker(tmp_path / "worker.txt")
    run.hears(f"host {hosts[2].name} at {hosts[2].worker_address} has joined with generator-")
    assert run.asked("serving") == "generator-0 generator-1 generator-2"
    assert "is in the run already" in command("hosts", str(run.folder), "add", hosts[2].worker_address)


def test_a_worker_that_gets_sigterm_goes_once_its_requests_have_ended(
    run: Run, hosts: Namespaces, workers: list[HostProcess], undisturbed: str
) -> None:
    run.tell(f"ask {COUNT} {TOKENS}")
    run.hears("asked")
    workers[0].send(signal.SIGTERM)
    run.hears(f"host {hosts[0].name} is drained: its worker got SIGTERM")
    assert workers[0].wait(LIMIT_S) == 143
    assert run.asked("answers") == undisturbed
    assert len(run.asked("serving").split()) == 2
    assert engines_of(hosts, 0) == []


def test_a_host_is_drained_by_command(run: Run, hosts: Namespaces, undisturbed: str) -> None:
    listed = command("hosts", str(run.folder), "drain", hosts[1].name)
    assert f"{hosts[1].name} {hosts[1].worker_address} left: it was asked to" in " ".join(listed.split())
    assert len(run.asked("serving").split()) == 1
    assert "there is no host 'nobody'" in command("hosts", str(run.folder), "drain", "nobody")


def command(*words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "titan_rl.cli.main", *words], capture_output=True, text=True, cwd=PROJECT, check=False
    )
    return done.stdout + done.stderr


def engines_of(hosts: Namespaces, index: int) -> list[str]:
    return [line for line in hosts[index].processes() if "bootstrap_main" in line]

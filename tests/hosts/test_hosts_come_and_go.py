"""Hosts that are cut off, die, join and leave while their generators answer requests. The generators are scripted; the
hosts' links and processes are real."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path

import pytest
from background import HANG_S
from hosts.controller import Run
from hosts.namespaces import PROJECT, HostProcess, Namespaces

LOST_WITHIN_S = 45.0  # a silence of 3 s, plus delays of a loaded machine; calls alone time out after over a minute
PATIENT_S = 60.0  # timeout of silence and hangs that is longer than any pause of a loaded machine
COUNT, TOKENS = 12, 1500


@pytest.fixture(scope="module")
def run(hosts: Namespaces, workers: list[HostProcess], tmp_path_factory: pytest.TempPathFactory) -> Generator[Run]:
    (folder := tmp_path_factory.mktemp("run")).mkdir(exist_ok=True)
    run = Run(folder, hosts)
    run.wait_for("ready")
    yield run
    assert run.end(HANG_S) == 0


@pytest.fixture
def patient_run(hosts: Namespaces, workers: list[HostProcess], tmp_path: Path) -> Generator[Run]:
    run = Run(tmp_path / "run", hosts, hosts={"silence_s": PATIENT_S, "hang_timeout_s": PATIENT_S})
    run.wait_for("ready")
    yield run
    assert run.end(HANG_S) == 0


@pytest.fixture(scope="module")
def undisturbed(run: Run) -> str:
    run.send(f"ask {COUNT} {TOKENS}")
    return run.ask("answers")


def test_two_seconds_without_a_link_lose_nothing(patient_run: Run, hosts: Namespaces) -> None:
    run = patient_run
    run.send(f"ask {COUNT} {TOKENS}")
    undisturbed, before = run.ask("answers"), run.ask("pids")
    run.send(f"ask {COUNT} {TOKENS}")
    run.wait_for("asked")
    hosts[1].link_down()
    time.sleep(2.0)
    hosts[1].link_up()
    assert run.ask("answers") == undisturbed
    assert run.ask("pids") == before
    assert run.ask("serving") == "generator-0 generator-1 generator-2"


def test_cut_off_host_is_lost_ends_its_processes_and_rejoins(run: Run, hosts: Namespaces, undisturbed: str) -> None:
    run.send(f"ask {COUNT} {TOKENS}")
    run.wait_for("asked")
    hosts[1].link_down()
    cut = time.monotonic()
    run.wait_for(f"host {hosts[1].name} is lost: no heartbeat for 3 s")
    assert time.monotonic() - cut < LOST_WITHIN_S
    assert run.ask("answers") == undisturbed
    while engines_of(hosts, 1):  # they end by themselves, as nothing reaches the host
        assert time.monotonic() - cut < HANG_S
        time.sleep(0.1)
    hosts[1].link_up()
    run.wait_for(f"host {hosts[1].name} at {hosts[1].worker_address} has joined with generator-")
    assert run.ask("serving") == "generator-0 generator-1 generator-2"


def test_rebooted_host_rejoins_at_the_same_address(
    run: Run, hosts: Namespaces, undisturbed: str, tmp_path: Path
) -> None:
    run.send(f"ask {COUNT} {TOKENS}")
    run.wait_for("asked")
    hosts[2].kill()
    killed = time.monotonic()
    run.wait_for(f"host {hosts[2].name} is lost")
    assert time.monotonic() - killed < LOST_WITHIN_S
    assert run.ask("answers") == undisturbed
    hosts[2].start()
    hosts[2].start_worker(tmp_path / "worker.txt")
    run.wait_for(f"host {hosts[2].name} at {hosts[2].worker_address} has joined with generator-")
    assert run.ask("serving") == "generator-0 generator-1 generator-2"
    assert "is already in the run" in command("hosts", str(run.folder), "add", hosts[2].worker_address)


def test_sigstopped_process_counts_as_dead_and_others_survive(
    run: Run, hosts: Namespaces, workers: list[HostProcess], undisturbed: str
) -> None:
    first, second, third = hosts
    workers[0].send(signal.SIGSTOP)  # this only keeps new runs from connecting
    run.send(f"ask {COUNT} {TOKENS}")
    run.wait_for("asked")
    pids_by_generator: dict[str, list[int]] = json.loads(run.ask("pids"))
    generators = {pid for pids in pids_by_generator.values() for pid in pids}
    generator = next(pid for inner, pid in first.pids("bootstrap_main").items() if inner in generators)
    agent = next(pid for inner, pid in second.pids("bootstrap_main").items() if inner not in generators)
    (monarch,) = third.pids("monarch_host").values()
    for pid in (generator, agent, monarch):
        os.kill(pid, signal.SIGSTOP)
    run.wait_for_all(
        "died: it has been stopped by a signal for 3 s; starting another",
        "is running again after",
        f"host {second.name} is lost: ",
        f"host {second.name} at {second.worker_address} has joined with generator-",
        f"host {third.name} is lost: ",
        f"host {third.name} at {third.worker_address} has joined with generator-",
    )
    assert run.ask("answers") == undisturbed
    assert run.ask("serving") == "generator-0 generator-1 generator-2"
    assert [len(engines_of(hosts, index)) for index in range(3)] == [2, 2, 2], "each has an agent and a generator"
    workers[0].send(signal.SIGCONT)


def test_worker_leaves_after_sigterm_once_its_requests_end(
    run: Run, hosts: Namespaces, workers: list[HostProcess], undisturbed: str
) -> None:
    run.send(f"ask {COUNT} {TOKENS}")
    run.wait_for("asked")
    workers[0].send(signal.SIGTERM)
    run.wait_for(f"host {hosts[0].name} is drained: its worker got SIGTERM")
    assert workers[0].wait(HANG_S) == 143
    assert run.ask("answers") == undisturbed
    assert len(run.ask("serving").split()) == 2
    assert engines_of(hosts, 0) == []


def test_drain_command_removes_a_host(run: Run, hosts: Namespaces, undisturbed: str) -> None:
    listed = command("hosts", str(run.folder), "drain", hosts[1].name)
    assert f"{hosts[1].name} {hosts[1].worker_address} left: titan-rl hosts asked for it" in " ".join(listed.split())
    assert len(run.ask("serving").split()) == 1
    assert "there is no host 'nobody'" in command("hosts", str(run.folder), "drain", "nobody")


def test_restarted_worker_rejoins_and_drained_one_stays_out(run: Run, hosts: Namespaces, tmp_path: Path) -> None:
    hosts[0].start_worker(tmp_path / "worker.txt")
    run.wait_for(f"host {hosts[0].name} at {hosts[0].worker_address} has joined with generator-")
    assert len(run.ask("serving").split()) == 2
    states = {line.split()[0]: line for line in command("hosts", str(run.folder), "list").splitlines()}
    assert "left: titan-rl hosts asked for it" in states[hosts[1].name]


def command(*words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "titan_rl.cli.main", *words], capture_output=True, text=True, cwd=PROJECT, check=False
    )
    return done.stdout + done.stderr


def engines_of(hosts: Namespaces, index: int) -> list[str]:
    return [line for line in hosts[index].processes() if "bootstrap_main" in line]

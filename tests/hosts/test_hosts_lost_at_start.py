"""Hosts that die while a run starts: it starts without them, or fails with an error that names them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from background import HANG_S
from depth import on_more_hosts
from hosts.controller import Run
from hosts.namespaces import HostProcess, NamespaceHost, Namespaces
from hosts.scripted import GATE, processes_of
from hosts.waiting import until

ENGINES: dict[str, Any] = {"engine": "hosts.scripted:make_at_gate", "num_generators": 3}
SOON_S = 60.0  # generous for a loaded machine; calls alone time out after over a minute


def start_worker(host: NamespaceHost, gate: Path):
    return host.start_worker(gate.parent / f"worker-{host.name}.txt", env={GATE: str(gate)})


@on_more_hosts
def test_run_starts_without_dead_hosts_which_rejoin_later(
    hosts: Namespaces, workers: list[HostProcess], gate: Path, tmp_path: Path
) -> None:
    first, second, third = hosts
    run = Run(tmp_path / "run", hosts, generation=ENGINES, hosts={"generate": 2})
    until(lambda: first.pids("bootstrap_main"), "a run inspects the first host")  # it has connected to its worker
    first.kill()
    run.wait_for(f"the run starts without the host at {first.worker_address}: ")
    until(lambda: (gate / second.name).exists(), "an engine starts on the second host")
    second.kill()
    (gate / "open").touch()
    run.wait_for(f"the run starts without host {second.name}: ")
    run.wait_for("ready")
    assert run.ask("serving") == "generator-1"
    first.start()
    start_worker(first, gate)
    run.wait_for(f"host {first.name} at {first.worker_address} has joined with generator-")
    assert run.end(HANG_S) == 0
    until(lambda: not processes_of(first) and not processes_of(third), "the run's processes on the other hosts end")
    second.start()
    start_worker(second, gate)
    for file in gate.iterdir():
        file.unlink()


@on_more_hosts
def test_death_of_a_needed_host_fails_the_start_and_cleans_up(
    hosts: Namespaces, workers: list[HostProcess], gate: Path, tmp_path: Path
) -> None:
    first, second, third = hosts
    run = Run(tmp_path / "run", hosts, generation={**ENGINES, "num_generators_range": (3, 9)})
    until(lambda: (gate / second.name).exists(), "an engine starts on the second host")
    second.kill()
    killed = time.monotonic()
    (gate / "open").touch()
    run.wait_for("failed: ", f"host {second.name}", "generation.num_generators_range begins with 3")
    assert run.end(HANG_S) == 0
    assert time.monotonic() - killed < SOON_S
    until(lambda: not processes_of(first) and not processes_of(third), "the run's processes on the other hosts end")

"""Cleanup on hosts after a run or a worker ends in any way."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import pytest
from background import HANG_S
from depth import on_more_hosts
from hosts.namespaces import PROJECT, HostProcess, Namespaces, namespaces
from hosts.scripted import TESTS, processes_of
from hosts.waiting import until

from titan_rl.cluster.hosts.folders import WORKER
from titan_rl.cluster.liveness.local_processes import unreaped_children_of

PROGRAM = """
import asyncio, sys
from hosts.scripted import *
from rollout.test_message_token_env import LetterRenderer
from run.test_controller import FakeTrainer
from titan_rl.config.hosts import HostsConfig
from titan_rl.config.sections import CheckpointConfig, SamplingConfig, ValidationConfig
from titan_rl.rollout.settings import RolloutConfig
from titan_rl.run.train import run_training
from titan_rl.run.components import Components
from titan_rl.scheduling.settings import SchedulingConfig
from titan_rl.training.settings import TrainingConfig

folder, *addresses = sys.argv[1:]

class Steps(FakeTrainer):
    async def step(self, samples):
        await asyncio.sleep(0.2)
        return await super().step(samples)

settings = config(
    addresses,
    run_dir=folder,
    generation=GenerationConfig(engine="hosts.scripted:make_with_memory", num_generators=len(addresses)),
    training=TrainingConfig(steps=10_000, row_tokens=256),
    rollout=RolloutConfig(group_size=2),
    sampling=SamplingConfig(max_tokens=4),
    scheduling=SchedulingConfig(groups_per_step=2, max_staleness=0),
    validation=ValidationConfig(num_prompts=0),
    checkpoint=CheckpointConfig(interval=0, interval_s=0),
)
sys.exit(run_training(settings, components=Components(trainer=Steps(), renderer=LetterRenderer())).code)
"""


class Machines:
    """Two hosts with a worker each."""

    def __init__(self, hosts: Namespaces, logs: Path) -> None:
        self.hosts = hosts
        self._logs = logs
        self.workers = [self.start_worker(index) for index in range(len(hosts))]

    def start_worker(self, index: int) -> HostProcess:
        host = self.hosts[index]
        return host.start_worker(self._logs / f"{host.name}.txt")

    def left(self, index: int) -> list[str]:
        """Processes and files on a host other than its worker and the worker's folder."""
        host = self.hosts[index]
        processes = processes_of(host)
        unreaped = [f"defunct {pid}" for pid in unreaped_children_of(self.workers[index].pid)]
        own, *others = sorted(host.files(str(host.temporary)), key=lambda name: not name.startswith(WORKER))
        return processes + unreaped + host.files("/dev/shm") + others + host.files(str(host.temporary / own))

    def until_nothing_is_left(self) -> None:
        for index in range(len(self.hosts)):
            until(lambda index=index: not self.left(index), lambda index=index: f"only {self.left(index)} is left")


@pytest.fixture(scope="module")
def machines(needs_namespaces: None, tmp_path_factory: pytest.TempPathFactory) -> Generator[Machines]:
    with namespaces(2) as made:
        yield Machines(made, tmp_path_factory.mktemp("workers"))


@contextlib.contextmanager
def run_on(machines: Machines, folder: Path) -> Generator[subprocess.Popen[bytes]]:
    """Start a run whose generators own shared memory, and yield it once it has trained a step."""
    log = folder / "run.log"
    arguments = [str(folder / "runs"), *[host.worker_address for host in machines.hosts]]
    with log.open("w") as output:
        run = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *arguments],
            env={**os.environ, "PYTHONPATH": f"{TESTS}{os.pathsep}{PROJECT}"},
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=PROJECT,
        )
    try:
        until(lambda: " 1/" in log.read_text() or run.poll() is not None, log.read_text)
        yield run
    finally:
        run.kill()
        run.wait()
        print(log.read_text())


@on_more_hosts
def test_ctrl_c_leaves_nothing_on_the_hosts(machines: Machines, tmp_path: Path) -> None:
    with run_on(machines, tmp_path) as run:
        run.send_signal(signal.SIGINT)
        assert run.wait(HANG_S) == 130
        machines.until_nothing_is_left()


@on_more_hosts
def test_leftovers_of_killed_worker_and_controller_are_removed(machines: Machines, tmp_path: Path) -> None:
    with run_on(machines, tmp_path) as run:
        assert all(host.files("/dev/shm") for host in machines.hosts)
        machines.workers[1].send(signal.SIGKILL)
        machines.workers[1].wait(HANG_S)
        until(lambda: not processes_of(machines.hosts[1]), lambda: "its processes end")
        assert machines.left(1), "without a worker, nothing cleans up"
        machines.workers[1] = machines.start_worker(1)
        assert machines.left(1) == []
        run.kill()
        machines.until_nothing_is_left()

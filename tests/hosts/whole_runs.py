"""Whole runs of the example on hosts: their results, their leftovers, and a gate that holds the trainer within a
step."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from e2e.runs import Run, run_training
from hosts.namespaces import NamespaceHost, Namespaces
from hosts.scripted import TESTS
from hosts.waiting import until

from titan_rl.cli.main import main
from titan_rl.cluster.hosts.folders import WORKER

TESTS_AS_CODE = f'["{TESTS}"]'
"""`pythonpath` for settings that name functions of tests."""


@dataclass(frozen=True)
class Computed:
    """Result of a run: figures of each step, transcripts, file names in the checkpoint folder, and the weights."""

    numbers: list[list[float]]
    transcripts: list[tuple[str, int, str]]
    checkpoints: list[str]
    weights: dict[str, bytes]

    @staticmethod
    def by(run: Run) -> Computed:
        steps = [record for record in run.metrics() if "train/loss" in record]
        transcripts = [json.loads(line) for line in (run.folder / "rollouts.jsonl").read_text().splitlines()]
        return Computed(
            [[step["step"], step["train/loss"], step["train/grad_norm"]] for step in steps],
            sorted((t["rollout_id"], t["step"], json.dumps(t["messages"])) for t in transcripts),
            sorted(path.name for path in (run.folder / "checkpoints").iterdir()),
            {path.name: path.read_bytes() for path in (run.folder / "export").glob("*.safetensors")},
        )


def listed_hosts(run: Run, capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    """Cells of the table that `titan-rl hosts` prints."""
    assert main(["hosts", str(run.folder), "list"]) == 0
    return sorted(re.split("  +", line) for line in capsys.readouterr().out.splitlines()[1:])


@contextlib.contextmanager
def run_on(hosts: Namespaces, folder: Path, *, gone: Sequence[NamespaceHost] = (), **settings: Any) -> Iterator[Run]:
    """Run on hosts with a worker each, and check at the end that nothing is left on them.

    Args:
        gone: Hosts that no longer exist at the end.
    """
    before = {host.name: _what_is_on(host) for host in hosts}
    addresses = ",".join(host.worker_address for host in hosts)
    with run_training(folder, hosts__addresses=addresses, **settings) as run:
        yield run
        assert run.leftovers() == []
    for host in hosts:
        if host not in gone:
            until(
                lambda host=host: _what_is_on(host) == before[host.name],
                lambda host=host: f"{host.name} has {_what_is_on(host)}, before the run {before[host.name]}",
            )


def _what_is_on(host: NamespaceHost) -> tuple[int, list[str], list[str]]:
    """Number of processes, segments of shared memory, and temporary folders and their files, including the worker's."""
    temporary: list[str] = []
    for folder in host.files(str(host.temporary)):
        name = WORKER if folder.startswith(WORKER) else folder
        temporary += [name, *[f"{name}/{file}" for file in host.files(str(host.temporary / folder))]]
    return len(host.processes()), host.files("/dev/shm"), temporary


def pid_of(run: Run, name: str) -> int:
    """Pid of a process of the run, or 0 while it does not exist."""
    with contextlib.suppress(ProcessLookupError, FileNotFoundError, ValueError):  # its folder may not exist yet
        return run.child(name)
    return 0


@dataclass(frozen=True)
class HeldRun:
    """Run whose trainer is held within a step unless a test lets it continue.

    Args:
        gate: Folder that synchronizes with the loss of `e2e.slow_loss` and the engine of `hosts.brakes`.
    """

    run: Run
    hosts: Namespaces
    gate: Path

    def until_held(self) -> None:
        """Wait until the trainer is held within the next step."""
        self.run.wait_for(lambda: (self.gate / "held").exists())

    def continue_until(self, moment: Callable[[], bool]) -> None:
        """Let the trainer continue until `moment` is true, then hold it within the next step."""
        (self.gate / "hold").unlink()
        self.run.wait_for(moment)
        (self.gate / "held").unlink(missing_ok=True)
        (self.gate / "hold").touch()

    def continue_until_printed(self, text: str) -> None:
        begin = len(self.run.output)
        self.continue_until(lambda: text in self.run.output[begin:])

    @contextlib.contextmanager
    def expects(self, *texts: str) -> Iterator[None]:
        """Check that the run prints each of `texts` after the block, and reaches the next step."""
        begin = len(self.run.output)
        yield
        for text in texts:
            self.run.wait_for(lambda text=text: text in self.run.output[begin:])
        self.until_held()

    def continue_until_generating(self, host: NamespaceHost) -> None:
        """Continue until an engine on the host has requests, whose tokens it generates slowly."""
        begun = self.gate / f"generates-{host.name}"
        begun.unlink(missing_ok=True)
        self.continue_until(begun.exists)

    def continue_until_pulling(self, host: NamespaceHost) -> None:
        """Continue until part of a version has arrived on the host."""
        before = host.received_bytes()
        self.continue_until(lambda: host.received_bytes() - before > 400_000)

    def host_of(self, name: str) -> NamespaceHost:
        """Host of a process of the run."""
        pid = self.run.child(name)
        return next(host for host in self.hosts if pid in host.pids("bootstrap_main").values())

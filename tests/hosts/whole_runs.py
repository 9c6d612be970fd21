"""Whole runs of the example on hosts: what they compute, what they leave, and brakes by which a test meets one in the
middle of what it is at."""

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
"""As `pythonpath`, for settings that name functions of tests."""


@dataclass(frozen=True)
class Computed:
    """The figures of each step, what was played, the names of checkpoints and what is beside them, and the weights."""

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
    """What `titan-rl hosts` shows of them, by cell."""
    assert main(["hosts", str(run.folder), "list"]) == 0
    return sorted(re.split("  +", line) for line in capsys.readouterr().out.splitlines()[1:])


@contextlib.contextmanager
def run_on(hosts: Namespaces, folder: Path, *, gone: Sequence[NamespaceHost] = (), **settings: Any) -> Iterator[Run]:
    """A run on hosts that have a worker each. Once it has ended, nothing of it is left on any of them.

    Args:
        gone: are there no more at its end.
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
    """Processes, segments of shared memory, and temporary folders with what is in them, that of the worker, too."""
    temporary: list[str] = []
    for folder in host.files(str(host.temporary)):
        name = WORKER if folder.startswith(WORKER) else folder
        temporary += [name, *[f"{name}/{file}" for file in host.files(str(host.temporary / folder))]]
    return len(host.processes()), host.files("/dev/shm"), temporary


def pid_of(run: Run, name: str) -> int:
    """Of the process of that name; 0 while there is none."""
    with contextlib.suppress(ProcessLookupError, FileNotFoundError, ValueError):  # nor a folder, yet
        return run.child(name)
    return 0


@dataclass(frozen=True)
class HeldRun:
    """A run whose trainer stands in the middle of a step whenever a test does not have it go on.

    Args:
        gate: of the loss of `e2e.slow_loss` and the engine of `hosts.brakes`.
    """

    run: Run
    hosts: Namespaces
    gate: Path

    def until_held(self) -> None:
        """Returns once the trainer is in the middle of the next step."""
        self.run.wait_for(lambda: (self.gate / "held").exists())

    def go_on_until(self, moment: Callable[[], bool]) -> None:
        """Have the trainer go on, until something has come, and stand in the step behind that."""
        (self.gate / "hold").unlink()
        self.run.wait_for(moment)
        (self.gate / "held").unlink(missing_ok=True)
        (self.gate / "hold").touch()

    def go_on_until_said(self, text: str) -> None:
        said = len(self.run.output)
        self.go_on_until(lambda: text in self.run.output[said:])

    @contextlib.contextmanager
    def says(self, *texts: str) -> Iterator[None]:
        """What is done in the block has the run say each of these, and train the next step."""
        said = len(self.run.output)
        yield
        for text in texts:
            self.run.wait_for(lambda text=text: text in self.run.output[said:])
        self.until_held()

    def go_on_until_generating(self, host: NamespaceHost) -> None:
        """Until an engine there has requests, of which it then takes its time for each token."""
        begun = self.gate / f"generates-{host.name}"
        begun.unlink(missing_ok=True)
        self.go_on_until(begun.exists)

    def go_on_until_pulling(self, host: NamespaceHost) -> None:
        """Until some of a version has arrived there."""
        before = host.received_bytes()
        self.go_on_until(lambda: host.received_bytes() - before > 400_000)

    def host_of(self, name: str) -> NamespaceHost:
        """Where a process of the run is."""
        pid = self.run.child(name)
        return next(host for host in self.hosts if pid in host.pids("bootstrap_main").values())

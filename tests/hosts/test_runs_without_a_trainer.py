"""Runs of the example without a trainer: one whose trainer does not start, and one that is stopped while its trainer
has no host."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("monarch", reason="needs the cpu or gpu extra")
pytest.importorskip("vllm", reason="needs the cpu or gpu extra")

from depth import on_more_hosts
from hosts.namespaces import HostProcess, NamespaceHost, Namespaces
from hosts.scripted import GATE
from hosts.whole_runs import TESTS_AS_CODE, pid_of, run_on

from titan_rl.core.run_files import read_status

pytestmark = on_more_hosts

SOON_S = 60.0  # engines end slowly on a loaded machine; hosts.wait_s is an hour
SETTINGS: dict[str, Any] = {
    "scheduling__max_staleness": 0,
    "validation__num_prompts": 1,
    "hosts__generate": 1,
    "rollout__num_workers": 0,
    "checkpoint__interval": 2,
}


def test_rank_killed_at_start_ends_the_run(hosts: Namespaces, workers: list[HostProcess], tmp_path: Path) -> None:
    with run_on(hosts, tmp_path, hosts__train=2, training__data_parallel=2, **SETTINGS) as run:
        run.wait_for(lambda: pid_of(run, "trainer-rank1") > 0)
        os.kill(run.child("trainer-rank1"), signal.SIGKILL)
        killed = time.monotonic()
        assert run.wait() == 1, run.output
        assert time.monotonic() - killed < SOON_S
        assert re.search("trainer died: (the )?process ", run.output)  # depends on who notices first


@pytest.fixture
def mortal(hosts: Namespaces, workers: list[HostProcess], gate: Path, tmp_path: Path) -> Iterator[NamespaceHost]:
    """The first host, which the test may kill. It is started again afterwards."""
    yield hosts[0]
    hosts[0].start()
    hosts[0].start_worker(tmp_path / "worker.txt", env={GATE: str(gate)})
    for file in gate.iterdir():
        file.unlink()


@pytest.mark.parametrize("stop", ["while it waits for a host", "before its host is lost"])
def test_stop_does_not_wait_for_a_host(
    stop: str, hosts: Namespaces, mortal: NamespaceHost, gate: Path, tmp_path: Path
) -> None:
    (runs := tmp_path / "runs").mkdir()
    for host in hosts.hosts[1:]:
        host.ask(["mount", "-t", "tmpfs", "tmpfs", str(runs)])  # it does not see the run's folder, so it cannot train
    settings = {**SETTINGS, "training__loss": "e2e.slow_loss:slow_grpo", "pythonpath": TESTS_AS_CODE}
    with run_on(hosts, tmp_path, gone=[mortal], training__steps=300, **settings) as run:
        run.wait_for_step(3)
        if stop == "before its host is lost":
            (gate / "hold").touch()
            run.wait_for(lambda: (gate / "held").exists())
            run.process.send_signal(signal.SIGINT)
            run.wait_for(lambda: "SIGINT: stopping" in run.output)
            mortal.kill()
        else:
            mortal.kill()
            run.wait_for(lambda: "the trainer waits for hosts, 3600 s at most: " in run.output)
            run.wait_for(lambda: read_status(run.folder).waits_for.startswith("trainer: it waits for hosts"))
            run.process.send_signal(signal.SIGINT)
        asked = time.monotonic()
        assert run.wait() == 130, run.output
        assert time.monotonic() - asked < SOON_S
        saved = max(path.name for path in (run.folder / "checkpoints").iterdir())
        last = run.output.splitlines()[-1]
        assert f"continue from step {int(saved.removeprefix('step-'))}" in last or "with step" in last, run.output

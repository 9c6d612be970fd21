"""`titan-rl sft` with a trainer on hosts that are drained, and with ranks on two hosts. One of these dies; its rank
restarts on the third."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("monarch", reason="needs the cpu or gpu extra")
pytest.importorskip("torchtitan", reason="needs the cpu or gpu extra")

from depth import on_more_hosts
from e2e.runs import Run, run_training
from hosts.namespaces import HostProcess, Namespaces

from titan_rl.cli.main import main
from titan_rl.core.run_files import read_hosts, read_status
from titan_rl.viewer.trace import Traces

pytestmark = on_more_hosts


def test_trainer_leaves_drained_hosts_and_waits_for_a_new_one(
    hosts: Namespaces, workers: list[HostProcess], tmp_path: Path
) -> None:
    addresses = ",".join(host.worker_address for host in hosts.hosts[:2])
    with taught(tmp_path, hosts__addresses=addresses, hosts__drain_s=1, logging__trace="false") as run:
        run.wait_for_step(10)
        assert main(["hosts", str(run.folder), "drain", hosts[0].name]) == 0
        run.wait_for(lambda: "trainer is running again after" in run.output)
        assert main(["hosts", str(run.folder), "drain", hosts[1].name]) == 0
        lacks = "trainer: it waits for hosts, 3600 s at most: no host that sees the run's folder"
        run.wait_for(lambda: read_status(run.folder).waits_for.startswith(lacks))
        assert "the trainer waits for hosts, 3600 s at most: no host that sees the run's folder" in " ".join(
            run.output.split()
        )
        assert main(["hosts", str(run.folder), "add", hosts[2].worker_address]) == 0
        assert run.wait() == 0, run.output
        assert read_status(run.folder).waits_for == ""
        assert trained_steps(run) == list(range(1, 59))
        record = read_hosts(run.folder)
        assert record is not None
        events = [(event["host"], event["what"]) for event in record["events"] if event["what"] != "drains"]
        assert events == [(hosts[0].name, "left"), (hosts[1].name, "left"), (hosts[2].name, "joined")]


def test_sft_survives_the_death_of_a_host(hosts: Namespaces, workers: list[HostProcess], tmp_path: Path) -> None:
    addresses = ",".join(host.worker_address for host in hosts)
    with taught(tmp_path, training__data_parallel=2, hosts__train=2, hosts__addresses=addresses) as run:
        run.wait_for_step(15)
        hosts[0].kill()
        assert run.wait() == 0, run.output
        assert "trainer is running again after" in run.output
        assert trained_steps(run) == list(range(1, 59))
        losses = [record["validation/loss"] for record in run.metrics() if "validation/loss" in record]
        assert losses[-1] < 0.8 * losses[0]
        traces = Traces(run.folder / "trace").read()
        assert {traces["trainer"].host, traces["trainer-rank1"].host} == {hosts[1].name, hosts[2].name}
    assert (tmp_path / "base" / "model.safetensors").is_file()


@contextlib.contextmanager
def taught(folder: Path, **settings: Any) -> Generator[Run]:
    """SFT run of 58 steps."""
    sft = {"demonstrations": 600, "batch_size": 10, "held_out": 20, "interval": 10, "out": folder / "base"}
    given = {f"sft__{name}": value for name, value in sft.items()}
    with run_training(folder, command="sft", sft__tiny_model__parameters=60_000, **given, **settings) as run:
        yield run


def trained_steps(run: Run) -> list[float]:
    return [record["step"] for record in run.metrics() if "train/loss" in record]

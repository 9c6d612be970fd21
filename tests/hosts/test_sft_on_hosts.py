"""`titan-rl sft` with a trainer whose ranks are on two hosts. One dies; its rank comes up on the third."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("monarch", reason="needs the cpu or gpu extra")
pytest.importorskip("torchtitan", reason="needs the cpu or gpu extra")

from depth import on_more_hosts
from e2e.runs import run_training
from hosts.namespaces import HostProcess, Namespaces

from titan_rl.viewer.trace.events import Traces

pytestmark = on_more_hosts


def test_a_model_is_taught_on_hosts_of_which_one_dies(
    hosts: Namespaces, workers: list[HostProcess], tmp_path: Path
) -> None:
    base = tmp_path / "base"
    settings = {"demonstrations": 600, "batch_size": 10, "held_out": 20, "interval": 10, "out": base}
    elsewhere: dict[str, Any] = {"hosts__addresses": ",".join(host.worker_address for host in hosts)}
    with run_training(
        tmp_path,
        command="sft",
        training__data_parallel=2,
        hosts__train=2,
        sft__tiny_model__parameters=60_000,
        **elsewhere,
        **{f"sft__{name}": value for name, value in settings.items()},
    ) as run:
        run.wait_for_step(15)
        hosts[0].kill()
        assert run.wait() == 0, run.output
        assert "trainer is there again after" in run.output
        steps = [record["step"] for record in run.metrics() if "train/loss" in record]
        assert steps == list(range(1, 59))
        losses = [record["validation/loss"] for record in run.metrics() if "validation/loss" in record]
        assert losses[-1] < 0.8 * losses[0]
        traces = Traces(run.folder / "trace").read()
        assert {traces["trainer"].host, traces["trainer-rank1"].host} == {hosts[1].name, hosts[2].name}
    assert (base / "model.safetensors").is_file()

"""The example on three hosts, two for training and one for generation. One is drained, which moves the trainer to the
other two. Then one dies with a trainer rank and the rollout worker, which restart on the last."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("monarch", reason="needs the cpu or gpu extra")
pytest.importorskip("vllm", reason="needs the cpu or gpu extra")

from depth import on_more_hosts
from e2e.runs import run_training
from hosts.namespaces import HostProcess, Namespaces
from hosts.whole_runs import Computed, listed_hosts, run_on

from titan_rl.cli.main import main

pytestmark = on_more_hosts

SETTINGS: dict[str, Any] = {
    "scheduling__max_staleness": 0,
    "training__steps": 4,
    "training__data_parallel": 2,
    "checkpoint__interval": 2,
    "validation__num_prompts": 1,
}


def test_example_is_bitwise_equal_on_hosts_that_leave_and_die(
    hosts: Namespaces, workers: list[HostProcess], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    roles: dict[str, Any] = {
        "hosts__train": 2,  # the first two
        "hosts__generate": 1,  # the last
        "hosts__play": 3,
        "rollout__num_workers": 1,  # on the first
    }
    with run_on(hosts, tmp_path, gone=[hosts[0]], **SETTINGS, **roles) as run:
        run.wait_for(lambda: (tmp_path / "runs" / "latest" / "hosts.json").exists())
        listed = listed_hosts(run, capsys)
        run.wait_for_step(1)
        assert main(["hosts", str(run.folder), "drain", hosts[1].name]) == 0
        drained = f"host {hosts[1].name} is drained: titan-rl hosts asked for it"
        assert f"trainer leaves its host: {drained}; starting another trainer" in run.output
        run.wait_for(lambda: "trainer is running again after" in run.output)
        hosts[0].kill()
        assert run.wait() == 0, run.output
        assert run.output.count("trainer is running again after") == 2
        assert f"host {hosts[0].name} is lost" in run.output
        assert "rollout-worker-0 is running again after" in run.output
        computed = Computed.by(run)
        logs = {path.stem for path in (run.folder / "logs").iterdir()}
        readable_by_others = [path for path in run.folder.rglob("*") if path.stat().st_mode & 0o077]
    assert readable_by_others == [], "files written by other hosts are private, too"
    assert listed == [
        [hosts[0].name, hosts[0].worker_address, "in the run", "rollout-worker-0, trainer"],
        [hosts[1].name, hosts[1].worker_address, "in the run", "trainer"],
        [hosts[2].name, hosts[2].worker_address, "in the run", "generator-0"],
    ]
    assert {"trainer", "trainer-rank1", "generator-0", "rollout-worker-0"} <= logs
    (alone := tmp_path / "one").mkdir()
    with run_training(alone, **SETTINGS) as run:
        assert run.wait() == 0, run.output
        assert computed == Computed.by(run)
    assert len(computed.numbers) == SETTINGS["training__steps"]

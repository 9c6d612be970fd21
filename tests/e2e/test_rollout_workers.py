"""Real rollouts in processes of their own, one of which is killed."""

import os
import signal

import pytest

pytest.importorskip("monarch", reason="needs the cpu or gpu extra")
pytest.importorskip("vllm", reason="needs the cpu or gpu extra")

from e2e.runs import run_training


def test_a_killed_worker_loses_no_group(tmp_path):
    with run_training(tmp_path, training__steps=12, rollout__num_workers=2, scheduling__max_staleness=0) as run:
        run.wait_for_step(1)
        os.kill(run.child("rollout-worker-1"), signal.SIGKILL)
        assert run.wait() == 0, run.output
        steps = [record for record in run.metrics() if "train/loss" in record]
        assert [record["step"] for record in steps] == list(range(1, 13))
        assert all(record["rollout/status/completed"] > 0 for record in steps)
        assert all(record["rollout/num_rollouts"] == 16 for record in steps)
        assert "rollout-worker-1 died" in (run.folder / "logs" / "controller.log").read_text()
        assert run.leftovers() == []

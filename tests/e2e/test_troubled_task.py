"""Environments and judges that fail in the controller's own process; see `test_train.py` for rollout workers."""

from pathlib import Path

import pytest

pytest.importorskip("monarch", reason="needs the cpu or gpu extra")
pytest.importorskip("vllm", reason="needs the cpu or gpu extra")

from depth import in_depth
from e2e.runs import run_training
from e2e.troubled_task import assert_failures_are_reported


@in_depth
def test_run_without_rollout_workers_reports_failures_and_finishes(tmp_path: Path):
    task = "tests.e2e.troubled_task:TroubledSort"
    with run_training(tmp_path, task__type=task, rollout__num_workers=0) as run:
        assert run.wait() == 0, run.output
        assert [record["step"] for record in run.metrics() if "train/loss" in record] == [1, 2, 3]
        assert_failures_are_reported(run, "controller")
        assert run.leftovers() == []

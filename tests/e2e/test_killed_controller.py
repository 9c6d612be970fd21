"""A real run whose controller is killed, and what continues it."""

import signal
import time

import pytest

pytest.importorskip("monarch", reason="needs the cpu or gpu extra")
pytest.importorskip("vllm", reason="needs the cpu or gpu extra")

from e2e.runs import run_training


def test_a_killed_controller_takes_its_processes_along_and_the_run_goes_on(tmp_path):
    with run_training(tmp_path, training__steps=7, checkpoint__interval=2) as run:
        run.wait_for_step(3)
        run.process.send_signal(signal.SIGKILL)
        run.wait(10)
        deadline = time.monotonic() + 20
        while left := run.leftovers():
            assert time.monotonic() < deadline, f"a killed controller leaves {left}"
            time.sleep(0.1)

        run.resume("--training.steps", "6")
        assert run.wait() == 0, run.output
        assert "continuing from" in run.output
        steps = [record["step"] for record in run.metrics() if "train/loss" in record]
        assert steps == [1, 2, 3, 4, 5, 6]
        validations = [record["step"] for record in run.metrics() if "validation/reward_mean" in record]
        assert validations == [0, 6]
        assert run.leftovers() == []

        run.resume("--training.steps", "6")
        assert run.wait() == 1
        assert "has trained all its 6 steps" in run.output

"""Code that is edited while a run uses it."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

pytest.importorskip("monarch", reason="needs the cpu or gpu extra")
pytest.importorskip("vllm", reason="needs the cpu or gpu extra")

from e2e.runs import Run, run_training

TASK = """
from titan_rl import Reward, Rubric
from examples.alphabet_sort.task import AlphabetSort

def fixed(rollout):
    return {value}

class FixedSort(AlphabetSort):
    def rubric(self):
        return Rubric([Reward(fixed)])
"""


def rewards(run: Run) -> list[tuple[int, float]]:
    """Reward of each training rollout with the step that it was trained in."""
    lines = map(json.loads, (run.folder / "rollouts.jsonl").read_text().splitlines())
    return [(line["step"], line["reward"]) for line in lines if line["phase"] == "train" and "reward" in line]


def test_replaced_worker_has_the_code_of_the_run_and_a_resume_the_edited_code(tmp_path: Path) -> None:
    task = tmp_path / "code" / "edited_sort.py"
    task.parent.mkdir()
    task.write_text(TASK.format(value=0.25))
    with run_training(
        tmp_path,
        pythonpath=f'["{task.parent}", "."]',
        task__type="edited_sort:FixedSort",
        training__steps=1000,
        rollout__num_workers=2,
        scheduling__filters="[]",
        generation__num_generators=1,
    ) as run:
        run.wait_for_step(1)
        task.write_text(TASK.format(value=0.75))
        os.kill(run.child("rollout-worker-0"), signal.SIGKILL)
        log = run.folder / "logs" / "controller.log"
        run.wait_for(lambda: "rollout-worker-0 is running again after" in log.read_text())
        run.wait_for_step(int(run.metrics()[-1]["step"]) + 3)
        run.process.send_signal(signal.SIGTERM)
        assert run.wait() == 143, run.output
        assert {reward for _, reward in rewards(run)} == {0.25}
        last = max(step for step, _ in rewards(run))
        run.resume(f"--training.steps={last + 3}")
        assert run.wait() == 0, run.output
        assert f"{task} changed since the run began; it continues with the new code" in run.output
        assert 0.75 in {reward for _, reward in rewards(run)}
        assert str(task) in (run.folder / "status.json").read_text()

"""Judges that fail on the real stack: the run goes on without their groups, says so, and ends when it is done."""

import json

import pytest

pytest.importorskip("monarch", reason="needs the cpu or gpu extra")
pytest.importorskip("vllm", reason="needs the cpu or gpu extra")

from e2e.runs import run_training


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_run_goes_on_without_the_groups_whose_judge_fails(tmp_path, num_workers):
    with run_training(
        tmp_path, task__type="tests.e2e.failing_judge_task:FailingJudges", rollout__num_workers=num_workers
    ) as run:
        assert run.wait() == 0, run.output
        output = " ".join(run.output.split())  # lines are wrapped
        assert "reward 'hangs' took longer than 3 s on rollout 'train-1/0'" in output
        assert "reward 'cancels_itself' on rollout 'train-2/" in output
        assert "was cancelled, though nobody had asked for that" in output
        assert "KeyError: 'validation-0' (tests/e2e/failing_judge_task.py:" in output
        trained = [record for record in run.metrics() if "train/loss" in record]
        assert [record["step"] for record in trained] == [1, 2, 3]
        assert sum(record.get("scheduling/dropped/reward_failed", 0) for record in trained) == 2
        lines = [json.loads(line) for line in (run.folder / "rollouts.jsonl").read_text().splitlines()]
        assert {line["group_id"] for line in lines if line.get("dropped") == "reward_failed"} == {
            "validation-0",
            "train-1",
            "train-2",
        }
        assert run.leftovers() == []

"""Environments and judges that fail on the real stack: the run names them, goes on, and ends when it is done."""

import json
from collections.abc import Iterator

import pytest

pytest.importorskip("monarch", reason="needs the cpu or gpu extra")
pytest.importorskip("vllm", reason="needs the cpu or gpu extra")

from depth import in_depth
from e2e.runs import Run, run_training


@pytest.fixture(scope="module", params=[1, pytest.param(0, marks=in_depth)])
def num_workers(request: pytest.FixtureRequest) -> int:
    """Rollouts run in the controller, or in a worker."""
    return request.param


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, num_workers: int) -> Iterator[Run]:
    """A run that has come to its end all the same."""
    folder = tmp_path_factory.mktemp("troubled")
    task = "tests.e2e.troubled_task:TroubledSort"
    with run_training(folder, task__type=task, rollout__num_workers=num_workers) as run:
        assert run.wait() == 0, run.output
        yield run


def output_of(run: Run) -> str:
    return " ".join(run.output.split())  # lines are wrapped


def test_the_call_that_blocks_is_named_on_the_screen_and_in_the_log(finished: Run, num_workers: int):
    output = output_of(finished)
    who = "rollout-worker-0: " if num_workers else ""
    assert f"{who}the event loop has stood still for 5 s: tests/e2e/troubled_task.py:" in output
    assert "in sleepy_step blocks it" in output
    log = "rollout-worker-0" if num_workers else "controller"
    assert "time.sleep(8.0)" in (finished.folder / "logs" / f"{log}.log").read_text()


def test_a_run_goes_on_without_the_groups_whose_judge_fails(finished: Run):
    output = output_of(finished)
    assert "reward 'hangs' took longer than 3 s on rollout 'train-1/0'" in output
    assert "reward 'cancels_itself' on rollout 'train-2/" in output
    assert "was cancelled, though nobody had asked for that" in output
    assert "KeyError: 'validation-0' (tests/e2e/troubled_task.py:" in output
    trained = [record for record in finished.metrics() if "train/loss" in record]
    assert [record["step"] for record in trained] == [1, 2, 3]
    assert sum(record.get("scheduling/dropped/reward_failed", 0) for record in trained) == 2
    lines = [json.loads(line) for line in (finished.folder / "rollouts.jsonl").read_text().splitlines()]
    assert {line["group_id"] for line in lines if line.get("dropped") == "reward_failed"} == {
        "validation-0",
        "train-1",
        "train-2",
    }


def test_nothing_is_left_behind(finished: Run):
    assert finished.leftovers() == []

"""An environment that blocks the event loop of the real stack: people read which one it is, while it does."""

import pytest

pytest.importorskip("monarch", reason="needs the cpu or gpu extra")
pytest.importorskip("vllm", reason="needs the cpu or gpu extra")

from e2e.runs import run_training

SAYS = "the event loop has stood still for 5 s: tests/e2e/blocking_task.py:"


@pytest.mark.parametrize(("num_workers", "who"), [(0, ""), (1, "rollout-worker-0: ")])
def test_the_call_that_blocks_is_named_on_the_screen_and_in_the_log(tmp_path, num_workers, who):
    with run_training(
        tmp_path, task__type="tests.e2e.blocking_task:BlockingSort", training__steps=1, rollout__num_workers=num_workers
    ) as run:
        assert run.wait() == 0, run.output
        output = " ".join(run.output.split())  # lines are wrapped
        assert who + SAYS in output
        assert "in sleepy_step blocks it" in output
        log = "rollout-worker-0" if num_workers else "controller"
        assert "time.sleep(8.0)" in (run.folder / "logs" / f"{log}.log").read_text()
        assert run.leftovers() == []

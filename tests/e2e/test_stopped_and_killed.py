"""A real run that is stopped in the middle of a step and resumes; `test_sharded_run.py` has one that is killed."""

import contextlib
import json
import re
import signal
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

pytest.importorskip("monarch", reason="needs the cpu or gpu extra")
pytest.importorskip("vllm", reason="needs the cpu or gpu extra")

from depth import in_depth
from e2e.runs import QUICK, RUN_S, Run, run_training
from e2e.slow_loss import GATE

from titan_rl.run.journal.state import RunState
from titan_rl.scheduling.task_mix import Shares
from titan_rl.training.state.checkpoint import latest

GROUPS = QUICK["scheduling.groups_per_step"]
SETTINGS = {
    "training__loss": "tests.e2e.slow_loss:slow_grpo",
    "logging__transcripts_per_step": GROUPS,
    "validation__num_prompts": 1,
}


def wait_until(condition: Callable[[], bool], run: Run, timeout_s: float = RUN_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert run.process.poll() is None, run.output
        assert time.monotonic() < deadline, run.output
        time.sleep(0.02)


def tasks_of_groups(folder: Path) -> dict[str, str]:
    lines = (folder / "rollouts.jsonl").read_text().splitlines()
    return {record["group_id"]: record["task"] for record in map(json.loads, lines)}


def assert_trained_once_and_in_order(run: Run, steps: int) -> None:
    expected = {
        step: [f"train-{index}" for index in range((step - 1) * GROUPS, step * GROUPS)] for step in range(1, steps + 1)
    }
    assert run.trained_groups() == expected
    turns = Shares({"long": 3.0, "short": 1.0})
    tasks = tasks_of_groups(run.folder)
    for index in range(steps * GROUPS):
        assert tasks[f"train-{index}"] == turns.next(), f"the turn of group {index}"
        turns.take(turns.next())
    assert [record["step"] for record in run.metrics() if "train/loss" in record] == list(range(1, steps + 1))


def stop_within_a_step(run: Run, gate: Path, log: Path, signum: signal.Signals) -> int:
    """Send a signal while the trainer is held in the middle of a step, and return the version at its start."""
    pattern = re.compile(r"stopped at version (\d+), with the trainer at work")
    times = len(pattern.findall(log.read_text()))
    (gate / "held").unlink(missing_ok=True)
    wait_until((gate / "held").exists, run)
    run.process.send_signal(signum)
    wait_until(lambda: len(pattern.findall(log.read_text())) > times, run)
    return int(pattern.findall(log.read_text())[-1])


def paths_accessible_to_others(run: Run) -> list[str]:
    """Files and sockets of a run that other users can access, including all abstract sockets."""
    found = []
    for path in (path for root in (run.folder, run.scratch) for path in root.rglob("*")):
        with contextlib.suppress(FileNotFoundError):  # the run renames checkpoint folders meanwhile
            if not path.is_symlink() and path.stat().st_mode & 0o077:
                found.append(str(path))
    listeners = run.listeners()
    assert len(listeners) > 3
    return found + sorted({path for path in listeners if not path.startswith(str(run.scratch))})


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder in which a file `hold` keeps the trainer in the middle of a step."""
    (gate := tmp_path / "gate").mkdir()
    monkeypatch.setenv(GATE, str(gate))
    return gate


def two_tasks(folder: Path, steps: int) -> AbstractContextManager[Run]:
    config = "tests/e2e/two_tasks.toml"
    return run_training(folder, config=config, training__steps=steps, checkpoint__interval=2, **SETTINGS)


@in_depth  # tests/run/test_stop_signals.py tests this with small programs
def test_second_signal_ends_run_at_once_and_keeps_the_checkpoint(tmp_path: Path, gate: Path):
    with two_tasks(tmp_path, steps=6) as run:
        run.wait_for_step(2)
        (gate / "hold").touch()
        stop_within_a_step(run, gate, run.folder / "logs" / "controller.log", signal.SIGINT)
        time.sleep(0.4)  # signals closer together count as one
        run.process.send_signal(signal.SIGINT)
        assert run.wait() == 130
        ended = (
            f"ended at once; checkpoints that were saved are kept; to continue: titan-rl train --resume {run.folder}"
        )
        assert ended in run.output
        run.wait_until_nothing_is_left()
        (gate / "hold").unlink()
        run.resume()
        assert run.wait() == 0, run.output
        assert_trained_once_and_in_order(run, 6)


def test_run_stopped_mid_step_resumes_without_retraining(tmp_path: Path, gate: Path):
    with two_tasks(tmp_path, steps=1000) as run:
        run.wait_for_step(1)
        (gate / "hold").touch()
        assert paths_accessible_to_others(run) == []
        before = stop_within_a_step(run, gate, run.folder / "logs" / "controller.log", signal.SIGTERM)
        (gate / "hold").unlink()
        assert run.wait() == 143, run.output
        assert "titan-rl: SIGTERM: stopping" in run.output
        assert (run.folder / "report.html").exists()
        assert run.leftovers() == []

        checkpoint = latest(run.folder / "checkpoints")
        assert checkpoint is not None
        state = RunState.read(checkpoint)
        resume = f"with step {state.step} saved; to continue: titan-rl train --resume {run.folder}"
        assert resume in run.output.splitlines()[-1]
        assert state.step == before + 1, "the step in flight completes and is the last"
        assert state.next_index >= state.step * GROUPS
        assert state.unsettled == tuple(range(state.step * GROUPS, state.next_index))
        assert (run.folder / "journal" / f"step-{state.step:06d}.journal").exists()
        assert_trained_once_and_in_order(run, state.step)

        with (run.folder / "journal" / f"step-{state.step:06d}.journal").open("ab") as segment:
            segment.write(bytes(12))  # as after a power loss
        last = state.step + 2
        run.resume("--training.steps", str(last))
        assert run.wait() == 0, run.output
        assert "12 bytes are not a record and are skipped" in run.output
        assert "continuing from" in run.output
        assert_trained_once_and_in_order(run, last)
        for suite in ("", "long/", "short/"):
            name = f"validation/{suite}reward_mean"
            assert [record["step"] for record in run.metrics() if name in record] == [0, last]
        assert run.leftovers() == []

        run.resume("--training.steps", str(last))
        assert run.wait() == 1
        assert f"has trained all its {last} steps" in run.output

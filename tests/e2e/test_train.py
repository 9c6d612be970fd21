"""The whole stack, as a user starts and stops it."""

import json
import os
import signal
import time

import pytest

pytest.importorskip("monarch", reason="needs the cpu or gpu extra")
pytest.importorskip("vllm", reason="needs the cpu or gpu extra")

from e2e.runs import Run, run_training


def test_a_run_trains_verifies_and_leaves_its_files_and_nothing_else(tmp_path):
    with run_training(tmp_path, scheduling__max_staleness=0, checkpoint__interval=2) as run:
        assert run.wait() == 0, run.output
        steps = [record for record in run.metrics() if "train/loss" in record]
        assert [record["step"] for record in steps] == [1, 2, 3]
        for record in steps:
            assert record["sync/probe_diff"] <= 1e-5
            assert record["train/on_policy_logprob_diff_mean"] <= 1e-6
            assert record["train/staleness_max"] == 0
            assert record["train/clip_fraction"] == 0
        validations = [record for record in run.metrics() if "validation/reward_mean" in record]
        assert [record["step"] for record in validations] == [0, 3]
        transcripts = [json.loads(line) for line in (run.folder / "rollouts.jsonl").read_text().splitlines()]
        assert any("alphabetical_sorted" in m["content"] for t in transcripts for m in t["messages"])
        for name in ("config.toml", "report.html", "logs/trainer.log", "logs/generator-0.log", "export/config.json"):
            assert (run.folder / name).stat().st_size > 0
        assert sorted(path.name for path in (run.folder / "checkpoints").iterdir()) == ["step-000002", "step-000003"]
        assert "validation" in run.output
        assert run.leftovers() == []


def test_rollouts_that_each_batch_interrupts_go_on(tmp_path):
    with run_training(
        tmp_path,
        training__steps=6,
        scheduling__oversample=1.0,
        scheduling__on_batch_ready="abort",
        scheduling__tail="tail_batch",
    ) as run:
        assert run.wait() == 0, run.output
        steps = [record for record in run.metrics() if "train/loss" in record]
        assert [record["step"] for record in steps] == [1, 2, 3, 4, 5, 6]
        assert all(record["rollout/status/aborted"] == 0 for record in steps)
        assert any(record.get("completion/num_resumes", 0) > 0 for record in steps)
        assert all(record["train/staleness_max"] <= 4 for record in steps)  # (8 + 4 slots + a window of 8 - 2) // 4
        assert run.leftovers() == []


def others_may_reach(run: Run) -> list[str]:
    """Files of a run, in its folder and its scratch folder, and sockets, that are not for its user alone. One socket
    of Monarch's is known to be for all: see docs/security.md."""
    files = [path for root in (run.folder, run.scratch) for path in root.rglob("*")]
    found = [str(path) for path in files if not path.is_symlink() and path.stat().st_mode & 0o077]
    listeners = run.listeners()
    assert len(listeners) > 3
    elsewhere = sorted({path for path in listeners if not path.startswith(str(run.scratch))})
    return found + (elsewhere if len(elsewhere) > 1 or not elsewhere[0].startswith("@") else [])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_in_order(tmp_path, number):
    with run_training(tmp_path, training__steps=1000) as run:
        run.wait_for_step(1)
        assert others_may_reach(run) == []
        run.process.send_signal(number)
        assert run.wait(60) == 128 + number
        (checkpoint,) = (run.folder / "checkpoints").iterdir()
        assert json.loads((checkpoint / "run_state.json").read_text())["step"] >= 1
        assert (run.folder / "report.html").exists()
        assert f"titan-rl: {number.name}: stopping" in run.output
        step = int(checkpoint.name.removeprefix("step-"))
        resume = f"with step {step} saved; to go on: titan-rl train --resume {run.folder}"
        assert resume in run.output.splitlines()[-1]
        assert run.leftovers() == []


def test_a_second_ctrl_c_ends_the_run_at_once_and_leaves_nothing(tmp_path):
    with run_training(tmp_path, training__steps=1000) as run:
        run.wait_for_step(1)
        run.process.send_signal(signal.SIGINT)
        time.sleep(0.4)  # two signals closer together are one
        run.process.send_signal(signal.SIGINT)
        assert run.wait(5) == 130
        assert (
            f"ended at once, with what was saved before; to go on: titan-rl train --resume {run.folder}" in run.output
        )
        deadline = time.monotonic() + 20
        while run.leftovers():
            assert time.monotonic() < deadline, run.leftovers()
            time.sleep(0.1)


def test_a_dead_trainer_ends_the_run_with_the_reason(tmp_path):
    with run_training(tmp_path, training__steps=1000) as run:
        run.wait_for_step(1)
        os.kill(run.child("trainer"), signal.SIGKILL)
        assert run.wait(60) == 1
        assert "trainer died" in run.output
        assert run.leftovers() == []


def test_a_dead_generator_is_replaced_and_no_rollout_is_lost(tmp_path):
    with run_training(tmp_path, training__steps=40) as run:
        run.wait_for_step(1)
        killed = run.child("generator-1")
        os.kill(killed, signal.SIGKILL)
        assert run.wait() == 0, run.output
        assert f"generator-1 died: process {killed} " in run.output
        assert "generator-1 is there again after" in run.output
        assert [r["step"] for r in run.metrics() if "train/loss" in r] == list(range(1, 41))
        assert all(r.get("rollout/status/error_generate", 0) == 0 for r in run.metrics())
        assert run.leftovers() == []


def test_the_last_generator_dying_too_often_ends_the_run(tmp_path):
    with run_training(tmp_path, training__steps=1000, generation__num_generators=1, generation__max_respawns=0) as run:
        run.wait_for_step(1)
        os.kill(run.child("generator-0"), signal.SIGKILL)
        assert run.wait(60) == 1
        assert "generator-0 died" in run.output
        assert run.leftovers() == []

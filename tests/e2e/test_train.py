"""The full stack, started and stopped as by a user."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("monarch", reason="needs the cpu or gpu extra")
pytest.importorskip("vllm", reason="needs the cpu or gpu extra")

import torch
from e2e.runs import Run, run_training
from e2e.troubled_task import assert_failures_are_reported
from safetensors.torch import load_file

ON_POLICY = {
    "scheduling__max_staleness": 0,
    "checkpoint__interval": 2,
    "validation__interval": 2,
    "logging__transcripts_per_step": 8,  # all rollouts of a validation
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A finished on-policy run of three steps."""
    with run_training(tmp_path_factory.mktemp("finished"), **ON_POLICY) as run:
        assert run.wait() == 0, run.output
        yield run


def test_run_trains_verifies_and_leaves_only_its_files(finished: Run):
    run = finished
    steps = [record for record in run.metrics() if "train/loss" in record]
    assert [record["step"] for record in steps] == [1, 2, 3]
    for record in steps:
        assert record["sync/probe_diff"] <= 1e-5
        assert record["sync/unverified_share"] == 0
        assert record["train/on_policy_logprob_diff_mean"] <= 1e-6
        assert record["train/staleness_max"] == 0
        assert record["train/clip_fraction"] == 0
        assert record["engine/running_requests_max"] >= record["engine/running_requests_mean"] > 0
        assert 1 >= record["engine/kv_cache_usage_max"] >= record["engine/kv_cache_usage_mean"] > 0
        assert record["engine/prefix_cache_queries"] > record["engine/prefix_cache_hits"] > 0  # hits of later turns
        assert record["engine/preemptions"] == 0
        assert record["processor/available_s"] > record["processor/controller_s"] > 0
    processes = [f"processor/{process}_s" for process in ("engine_steps", "generators", "trainer_steps", "trainer")]
    assert sum(record[process] for record in steps for process in processes) > 0  # reports may be a second old
    validations = [record for record in run.metrics() if "validation/reward_mean" in record]
    assert [record["step"] for record in validations] == [0, 2, 3]
    transcripts = [json.loads(line) for line in (run.folder / "rollouts.jsonl").read_text().splitlines()]
    assert any("alphabetical_sorted" in m["content"] for t in transcripts for m in t["messages"])
    for name in ("config.toml", "report.html", "logs/trainer.log", "logs/generator-0.log", "export/config.json"):
        assert (run.folder / name).stat().st_size > 0
    assert sorted(path.name for path in (run.folder / "checkpoints").iterdir()) == ["step-000002", "step-000003"]
    assert "validation" in run.output
    assert run.leftovers() == []


def is_reproducible(metric: str) -> bool:
    """Whether a metric depends only on the computation, not on timing."""
    if metric.endswith(("_s", "seconds", "in_flight")):
        return False
    return metric == "step" or metric.startswith(("train/", "validation/")) or metric.endswith("tokens_mean")


def computed_results(run: Run) -> tuple[list[dict[str, float]], list[tuple[str, int, str]], dict[str, torch.Tensor]]:
    """Metrics, answers and weights."""
    records = sorted(run.metrics(), key=lambda record: (record["step"], "train/loss" in record))
    numbers = [{k: v for k, v in record.items() if is_reproducible(k)} for record in records]
    transcripts = [json.loads(line) for line in (run.folder / "rollouts.jsonl").read_text().splitlines()]
    answers = sorted((t["rollout_id"], t["step"], json.dumps(t["messages"])) for t in transcripts)
    return numbers, answers, load_file(run.folder / "export" / "model.safetensors")


def test_same_seed_is_bitwise_reproducible_despite_a_trainer_hang(finished: Run, tmp_path: Path):
    numbers, answers, weights = computed_results(finished)
    assert sum("train/loss" in record for record in numbers) == 3
    others = {"validation__beside_training": "true", "generation__num_generators": 2, "rollout__num_workers": 1}
    with run_training(tmp_path, **ON_POLICY, **others) as run:
        run.wait_for_step(1)
        os.kill(run.child("trainer"), signal.SIGSTOP)
        assert run.wait() == 0, run.output
        assert "trainer died: it has been stopped by a signal for 3 s" in run.output
        assert "trainer is running again after" in run.output
        assert "training waits for the validation" not in run.output
        assert run.leftovers() == []
        again = computed_results(run)
        for record in again[0]:
            record.pop("train/respawns", None)
    assert numbers == again[0]
    assert answers == again[1]
    assert all(torch.equal(tensor, again[2][name]) for name, tensor in weights.items())


def test_no_group_is_lost_through_interruptions_and_process_deaths(tmp_path: Path):
    """Each batch interrupts the requests in flight; a killed generator and a hung rollout worker are replaced.
    Environments block their workers, and judges hang, cancel themselves and raise."""
    with run_training(
        tmp_path,
        task__type="tests.e2e.troubled_task:TroubledSort",
        training__steps=1000,
        generation__num_generators=2,
        rollout__num_workers=2,
        scheduling__oversample=1.0,
        scheduling__on_batch_ready="abort",
        scheduling__tail="tail_batch",
    ) as run:
        run.wait_for_step(1)
        for who in (run.process.pid, run.child("rollout-worker-0")):
            assert "libtorch" not in Path(f"/proc/{who}/maps").read_text(), "it takes seconds to import"
        killed = run.child("generator-1")
        assert b"fork_server.py" in Path(f"/proc/{killed}/cmdline").read_bytes(), "its start takes much longer"
        os.kill(killed, signal.SIGKILL)
        run.wait_for_step(3)
        os.kill(run.child("rollout-worker-1"), signal.SIGSTOP)
        log = run.folder / "logs" / "controller.log"
        run.wait_for(lambda: "generator-1 is running again after" in run.output)
        run.wait_for(lambda: "rollout-worker-1 is running again after" in log.read_text())
        run.wait_for_step(int(run.metrics()[-1]["step"]) + 2)
        run.process.send_signal(signal.SIGTERM)
        assert run.wait() == 143, run.output
        assert f"generator-1 died: process {killed} was killed by SIGKILL" in run.output
        assert "rollout-worker-1 died: it has been stopped" in log.read_text()
        steps = [record for record in run.metrics() if "train/loss" in record]
        assert [record["step"] for record in steps] == list(range(1, len(steps) + 1))
        assert all(record["rollout/num_rollouts"] == 16 for record in steps)
        assert all(record["rollout/status/completed"] > 0 for record in steps)
        assert all(record["rollout/status/aborted"] == 0 for record in steps)
        assert all(record.get("rollout/status/error_generate", 0) == 0 for record in steps)
        assert any(record.get("completion/num_resumes", 0) > 0 for record in steps)
        assert all(record["train/staleness_max"] <= 4 for record in steps)  # (8 + 4 slots + a window of 8 - 2) // 4
        assert_failures_are_reported(run, "rollout-worker-0")
        assert run.leftovers() == []

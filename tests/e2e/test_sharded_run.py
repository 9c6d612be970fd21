"""A real run with a trainer of two ranks: resume with another layout, and the death of a rank."""

import os
import signal

import pytest

pytest.importorskip("monarch", reason="needs the cpu or gpu extra")
pytest.importorskip("vllm", reason="needs the cpu or gpu extra")

from e2e.runs import run_training


def test_sharded_run_resumes_with_another_layout_and_survives_a_rank_death(tmp_path):
    short = {"training__steps": 2, "validation__num_prompts": 1, "validation__samples_per_prompt": 1}
    with run_training(tmp_path, scheduling__max_staleness=0, training__data_parallel=2, **short) as run:
        assert run.wait() == 0, run.output
        assert run.leftovers() == []
        split = ("--training.data_parallel", "1", "--training.tensor_parallel", "2")
        run.resume("--training.steps", "1000", "--hosts.max_respawns", "1", *split)
        run.wait_for_step(3)
        os.kill(run.child("trainer-rank1"), signal.SIGKILL)
        run.wait_for(lambda: "trainer is running again after" in run.output)
        run.wait_for_step(1 + run.metrics()[-1]["step"])
        os.kill(run.child("trainer-rank1"), signal.SIGKILL)
        assert run.wait() == 1
        assert "is not replaced: hosts.max_respawns = 1, and 1 was replaced before" in run.output
        steps = [record for record in run.metrics() if "train/loss" in record]
        assert [record["step"] for record in steps] == list(range(1, len(steps) + 1))
        assert [record["train/respawns"] for record in steps if "train/respawns" in record] == [1]
        for record in steps:
            # Generators hold the combined weights of the ranks.
            assert record["sync/probe_diff"] <= 1e-5
            assert record["sync/unverified_share"] == 0
            assert record["train/on_policy_logprob_diff_mean"] <= 1e-6
            assert record["train/num_samples"] == 16
        assert run.leftovers() == []

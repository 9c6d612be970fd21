"""A real run of agent programs and a trainer of two ranks: killed, resumed with another layout, and bereft of ranks."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator

import pytest

pytest.importorskip("monarch", reason="needs the cpu or gpu extra")
pytest.importorskip("vllm", reason="needs the cpu or gpu extra")

from e2e.runs import REPOSITORY, Run, run_training

CONFIG = """
[model]
path = "{base}"
max_context = 256

[generation]
kv_cache_gib = 0.5

[sampling]
max_tokens = 12

[training]
row_tokens = 1024

[task]
type = "titan_rl.tasks.agents:AgentTask"
command = ["{{python}}", "-I", "-S", "{talker}", "{{question}}"]
train_file = "{samples}"
validation_file = "{samples}"
keep = "all"
"""
SAMPLES = [{"question": f"Sort: {name} a", "worth": worth} for name, worth in (("b", 0.25), ("c", 0.5), ("d", 1.0))]
GROUPS = 2
SETTINGS = {
    "sampling__seeded": "false",  # as by default in off-policy runs
    "scheduling__max_staleness": 0,
    "scheduling__groups_per_step": GROUPS,
    "training__steps": 1000,
    "training__tensor_parallel": 2,
    "checkpoint__interval": 2,
    "validation__num_prompts": 1,
    "validation__samples_per_prompt": 1,
    "logging__transcripts_per_step": GROUPS,
    "generation__engine": "tests.e2e.own_engine:make",
    "rollout__num_workers": 1,
    "hosts__max_respawns": 1,
}


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A run of three or more steps whose controller was killed."""
    folder = tmp_path_factory.mktemp("agents")
    samples, config = folder / "samples.jsonl", folder / "agents.toml"
    samples.write_text("".join(json.dumps(sample) + "\n" for sample in SAMPLES))
    base = REPOSITORY / "examples" / "alphabet_sort" / "base"
    talker = REPOSITORY / "tests" / "agents" / "talker.py"
    config.write_text(CONFIG.format(base=base, talker=talker, samples=samples))
    with run_training(folder, config=str(config), **SETTINGS) as run:
        run.wait_for_step(3)
        run.process.send_signal(signal.SIGKILL)
        run.wait()
        yield run


def assert_trained_on_received_tokens(run: Run) -> None:
    """Check that the trainer's logprobs of all branches equal the engine's, and that no step is missing."""
    steps = [record for record in run.metrics() if "train/loss" in record]
    assert [record["step"] for record in steps] == list(range(1, len(steps) + 1))
    for record in steps:
        # Generators hold the combined weights of the ranks.
        assert record["sync/probe_diff"] <= 1e-5
        assert record["sync/unverified_share"] == 0
        assert record["train/on_policy_logprob_diff_mean"] <= 1e-6
        assert record["train/num_samples"] == 16
        assert record["rollout/branches_per_rollout"] == 2
        assert record["rollout/status/completed"] == 1


def test_agent_programs_train_on_received_tokens_and_end_with_a_killed_run(killed: Run) -> None:
    killed.wait_until_nothing_is_left()
    assert "rollout-worker-0: agents ask the policy at http://127.0.0.1:" in killed.output
    assert_trained_on_received_tokens(killed)
    assert sum(record.get("engine/own_steps", 0) for record in killed.metrics()) > 0, "it has a user-defined engine"
    rollouts = [json.loads(line) for line in (killed.folder / "rollouts.jsonl").read_text().splitlines()]
    assert {rollout["reward"] for rollout in rollouts} <= {sample["worth"] for sample in SAMPLES}
    assert len(list((killed.folder / "agents").iterdir())) >= 3 * GROUPS * 4


def test_killed_run_resumes_with_another_layout_and_survives_a_rank_death(killed: Run) -> None:
    run = killed
    run.wait_until_nothing_is_left()
    run.resume("--training.tensor_parallel", "1", "--training.data_parallel", "2", "--generation.engine", "vllm")
    run.wait_for_step(4)
    assert "continuing from" in run.output
    os.kill(run.child("trainer-rank1"), signal.SIGKILL)
    run.wait_for(lambda: "trainer is running again after" in run.output)
    run.wait_for_step(1 + run.metrics()[-1]["step"])
    os.kill(run.child("trainer-rank1"), signal.SIGKILL)
    assert run.wait() == 1
    assert "is not replaced: hosts.max_respawns = 1, and 1 was replaced before" in run.output
    assert_trained_on_received_tokens(run)
    steps = [record for record in run.metrics() if "train/loss" in record]
    assert [record["train/respawns"] for record in steps if "train/respawns" in record] == [1]
    trained = run.trained_groups()
    for step in range(1, len(steps) + 1):
        assert trained[step] == [f"train-{index}" for index in range((step - 1) * GROUPS, step * GROUPS)]
    run.wait_until_nothing_is_left()

"""A policy on real engines, trained with an agent program per rollout."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from background import HANG_S

pytest.importorskip("monarch", reason="needs the cpu or gpu extra")
pytest.importorskip("vllm", reason="needs the cpu or gpu extra")

from e2e.runs import REPOSITORY, run_training

CONFIG = """
[model]
path = "{base}"
max_context = 256

[generation]
kv_cache_gib = 0.5

[sampling]
max_tokens = 12

[training]
row_tokens = 4096

[task]
type = "titan_rl.tasks.agents:AgentTask"
command = ["{{python}}", "-I", "-S", "{talker}", "{{question}}"]
train_file = "{samples}"
validation_file = "{samples}"
keep = "all"
"""
SAMPLES = [{"question": f"Sort: {name} a", "worth": worth} for name, worth in (("b", 0.25), ("c", 0.5), ("d", 1.0))]


def test_agent_programs_train_on_the_tokens_they_received(tmp_path: Path) -> None:
    """On policy, the trainer's logprobs of all branches equal the engine's, and no agent process is left. Requests are
    unseeded, which is the default of off-policy runs."""
    samples, config = tmp_path / "samples.jsonl", tmp_path / "agents.toml"
    samples.write_text("".join(json.dumps(sample) + "\n" for sample in SAMPLES))
    base = REPOSITORY / "examples" / "alphabet_sort" / "base"
    talker = REPOSITORY / "tests" / "agents" / "talker.py"
    config.write_text(CONFIG.format(base=base, talker=talker, samples=samples))
    on_policy = {
        "sampling__seeded": "false",
        "scheduling__max_staleness": 0,
        "scheduling__groups_per_step": 2,
        "training__steps": 2,
    }
    with run_training(tmp_path, config=str(config), rollout__num_workers=1, **on_policy) as run:
        assert run.wait() == 0, run.output
        assert "rollout-worker-0: agents ask the policy at http://127.0.0.1:" in run.output
        steps = [record for record in run.metrics() if "train/loss" in record]
        assert [record["step"] for record in steps] == [1, 2]
        for record in steps:
            assert record["train/on_policy_logprob_diff_mean"] <= 1e-6
            assert record["rollout/branches_per_rollout"] == 2
            assert record["rollout/status/completed"] == 1
        rollouts = [json.loads(line) for line in (run.folder / "rollouts.jsonl").read_text().splitlines()]
        assert {rollout["reward"] for rollout in rollouts} <= {sample["worth"] for sample in SAMPLES}
        assert len(list((run.folder / "agents").iterdir())) >= 2 * 2 * 4
        deadline = time.monotonic() + HANG_S  # the process that watches agents ends after the worker
        while run.processes() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert run.leftovers() == []

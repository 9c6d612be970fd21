"""The tutorial works as written: its files and settings load, and its task is played in a whole run.

With TITAN_RL_TEST_DOCS=1 (`make test-docs`, three minutes) its commands run too, in order.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from docs.pages import ROOT, blocks, files
from rollout.test_message_token_env import LetterRenderer
from run.test_controller import FakeTrainer

import titan_rl
from titan_rl import Completion, FinishReason, VersionSpan
from titan_rl.core.clusters import repeated_prompts

PAGE = ROOT / "docs" / "tutorial.md"
COINS = (20, 10, 5, 2, 1)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in files(PAGE).items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


async def greedy(prompt_token_ids: Any, *, request_id: str, session_id: str | None = None, sampling: Any) -> Completion:
    """Pay with the largest coin that fits, or, in every second rollout, with the smallest. Tokens are characters."""
    left = int(re.findall(r"\d+", "".join(map(chr, prompt_token_ids)))[-1])
    fitting = [coin for coin in COINS if coin <= left]
    answer = [*map(ord, str(fitting[0 if int(request_id.split("/")[1]) % 2 else -1])), 0]
    return Completion(request_id, answer, [0.0] * len(answer), FinishReason.STOP, [VersionSpan(0, len(answer))])


def test_tutorial_task_is_played_and_scored_in_a_run(folder: Path) -> None:
    quick = {
        "training.steps": 2,
        "scheduling.groups_per_step": 4,
        "validation.num_prompts": 4,
        "model.max_context": 512,
    }
    trainer = FakeTrainer()
    try:
        summary = titan_rl.train(
            "change.toml",
            trainer=trainer,
            generate=greedy,
            renderer=LetterRenderer(),
            overrides=quick | {"training.row_tokens": 4096},
        )
    finally:
        sys.modules.pop("change", None)
    assert (summary.steps, len(trainer.trained)) == (2, 2)
    records = [json.loads(line) for line in (summary.run_dir / "rollouts.jsonl").read_text().splitlines()]
    assert {record["status"] for record in records} == {"completed"}
    assert max(record["reward"] for record in records) == 1.0
    assert min(record["reward"] for record in records) < 1.0


def test_tutorial_holds_out_enough_different_amounts(folder: Path) -> None:
    try:
        (source,) = titan_rl.load_config("change.toml", check_files=False).tasks
        held_out = source.task.validation_samples(64)
    finally:
        sys.modules.pop("change", None)
    assert "64 prompts (20 distinct)" in PAGE.read_text()
    assert len(set(held_out)) == 20
    assert repeated_prompts(len(held_out), len(set(held_out))) is None


@pytest.mark.skipif("TITAN_RL_TEST_DOCS" not in os.environ, reason="trains: make test-docs")
def test_tutorial_commands_run_and_the_policy_learns(tmp_path: Path) -> None:
    (folder := tmp_path / "change").mkdir()
    for name, text in files(PAGE).items():
        (folder / name).write_text(text)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for command in [line for block in blocks(PAGE, "sh") for line in block.splitlines()][2:]:
        done = subprocess.run(
            ["bash", "-c", command.replace("titan-rl", f"{sys.executable} -m titan_rl.cli.main")],
            cwd=folder,
            env=os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    lines = (folder / "runs" / "latest" / "metrics.jsonl").read_text().splitlines()
    rewards = [
        record["validation/reward_mean"] for record in map(json.loads, lines) if "validation/reward_mean" in record
    ]
    assert rewards[-1] > rewards[0] + 0.25

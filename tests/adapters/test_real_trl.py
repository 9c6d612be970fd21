"""Rewards compared with those of TRL's `GRPOTrainer`. Run with `make test-clients`, because TRL is slow to import."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
from adapters import trl_functions
from adapters.playing import play
from own_venv import asked_for

from titan_rl.tasks.adapters.trl import TRLTask, name_of

pytestmark = asked_for

NAMES = ("is_right", "of_long_ones", "never", "slowly", "overlong")
SAID = ["yes", "no", "never so", "y"]


def by_trl(prompts: list[Any], completions: list[Any], row: dict[str, Any]) -> list[dict[str, float]]:
    """Compute the value of each function for each completion with TRL. None values are left out."""
    from transformers import TrainerState
    from trl.trainer.grpo_trainer import GRPOTrainer
    from trl.trainer.utils import shutdown_event_loop_in_daemon, start_event_loop_in_daemon

    functions = [getattr(trl_functions, name) for name in NAMES]
    thread, loop, ready = start_event_loop_in_daemon(name="async rewards")
    ready.wait()
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(device="cpu", is_main_process=True),
        args=SimpleNamespace(report_to=[]),
        state=TrainerState(),
        reward_funcs=functions,
        reward_func_names=[name_of(function) for function in functions],
        reward_processing_classes=[None] * len(functions),
        environments=None,
        async_loop=loop,
        _log_completion_extra=lambda column, values: None,
        _log_metric=lambda name, value: None,
    )
    try:
        inputs = [{"prompt": prompt, **row} for prompt in prompts]
        ids = [[0]] * len(prompts)
        values = GRPOTrainer._calculate_rewards(trainer, inputs, prompts, completions, ids)  # pyright: ignore
    finally:
        shutdown_event_loop_in_daemon(thread, loop)
    return [
        {name: value for name, value in zip(trainer.reward_func_names, given, strict=True) if not math.isnan(value)}
        for given in values.tolist()
    ]


async def test_reward_functions_give_the_same_values_as_in_trl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    row = {"prompt": "Is it?", "answer": "yes"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    functions = tuple(f"adapters.trl_functions:{name}" for name in NAMES)
    task = TRLTask(dataset=str(tmp_path / "rows.jsonl"), reward_funcs=functions, held_out=0)
    group = await play(task, row, *[lambda _, text=text: text for text in SAID])
    expected = await asyncio.to_thread(by_trl, [row["prompt"]] * len(SAID), SAID, {"answer": "yes"})
    logged = ("longest", "length")
    ours = [
        {name: value for name, value in rollout.reward_breakdown.items() if name not in logged}
        for rollout in group.rollouts
    ]
    assert ours == [pytest.approx(given) for given in expected]
    assert [rollout.reward for rollout in group.rollouts] == pytest.approx([sum(row.values()) for row in expected])

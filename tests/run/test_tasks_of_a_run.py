"""Metrics per task of a run of several tasks, and its validation suites."""

from __future__ import annotations

import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from test_controller import Counting
from test_killed_mix import IN_ORDER, TASKS, Notes
from test_killed_run import Rig

from titan_rl import Completion
from titan_rl.config.sections import ValidationConfig
from titan_rl.config.tasks import TaskSource, ValidationSuite
from titan_rl.run.directory import read_jsonl

HARD = TaskSource(task=Counting(), name="hard")  # pyright: ignore[reportArgumentType]
SUITES = (
    ValidationSuite(name="plain", task="plain", num_prompts=2, interval=2),
    ValidationSuite(name="unseen", task=HARD, num_prompts=3, samples_per_prompt=1, temperature=0.0, interval=3),
)


async def test_each_task_has_its_own_metrics_and_share_of_groups(tmp_path: Path):
    rig = Rig(tmp_path, 0, tasks=TASKS, steps=8, max_staleness=0)
    await rig.run()
    steps = [record for record in read_jsonl(tmp_path / "metrics.jsonl") if "train/loss" in record]
    trained = {name: sum(step[f"task/{name}/num_groups"] for step in steps) for name in ("plain", "picky", "led")}
    assert trained == {"plain": 12.0, "picky": 6.0, "led": 6.0}
    for step in steps:
        assert sum(step[f"task/{name}/share"] for name in trained) == pytest.approx(1.0)
    assert sum(step.get("task/picky/dropped/too_easy", 0.0) for step in steps) > 0
    assert not any(name.startswith("task/plain/dropped") for step in steps for name in step)
    for step in steps:
        mean = sum(
            step[f"task/{n}/reward_mean"] * step[f"task/{n}/num_groups"]
            for n in trained
            if step[f"task/{n}/num_groups"]
        )
        assert mean / 3 == pytest.approx(step["rollout/reward_mean"])
    of = {
        record["group_id"]: record["task"]
        for record in read_jsonl(tmp_path / "rollouts.jsonl")
        if record["phase"] == "train"
    }
    assert set(of.values()) == set(trained)


async def test_run_of_one_task_has_no_per_task_metrics(tmp_path: Path):
    rig = Rig(tmp_path, 0, steps=2)
    await rig.run()
    names = {name for record in read_jsonl(tmp_path / "metrics.jsonl") for name in record}
    assert not any(name.startswith(("task/", "validation/counting")) for name in names)


async def test_each_suite_has_its_own_metrics_prompts_and_interval(tmp_path: Path):
    validation = ValidationConfig(num_prompts=4, samples_per_prompt=2, suites=SUITES)
    rig = Rig(tmp_path, 0, tasks=TASKS, steps=6, validation=validation, max_staleness=0)
    await rig.run()
    records = read_jsonl(tmp_path / "metrics.jsonl")

    def steps_with(name: str) -> list[int]:
        return [record["step"] for record in records if name in record]

    assert steps_with("validation/plain/reward_mean") == [0, 2, 4, 6]
    assert steps_with("validation/unseen/reward_mean") == [0, 3, 6]
    assert steps_with("validation/reward_mean") == [0, 6]
    first = records[0]
    assert (first["validation/plain/num_groups"], first["validation/plain/num_rollouts"]) == (2.0, 4.0)
    assert (first["validation/unseen/num_groups"], first["validation/unseen/num_rollouts"]) == (3.0, 3.0)
    assert first["validation/reward_mean"] == pytest.approx(
        (first["validation/plain/reward_mean"] + first["validation/unseen/reward_mean"]) / 2
    )
    played = Counter(
        r["task"] for r in read_jsonl(tmp_path / "rollouts.jsonl") if r["phase"] == "validation" and r["step"] == 0
    )
    assert played == {"plain": 4, "hard": 3}


class Guessing(Rig):
    """Rig whose answers are right or wrong by the seed of their request, as sampled tokens are."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        answer = self.replica.generate
        self.given: list[Any] = []

        async def guess(prompt_token_ids: Any, *, sampling: Any, **request: Any) -> Completion:
            completion = await answer(prompt_token_ids, sampling=sampling, **request)
            if zlib.crc32(f"{sampling.seed} {sampling.temperature}".encode()) % 3 == 0:
                completion.token_ids[0] = 9  # pyright: ignore
            return completion

        self.replica.generate = guess  # pyright: ignore
        step = self.trainer.step

        async def noting(samples: Any) -> Any:
            self.given.append([repr(sample) for sample in samples])
            return await step(samples)

        self.trainer.step = noting  # pyright: ignore


@pytest.mark.parametrize("staleness", [0, 1])
async def test_validation_does_not_change_training(tmp_path: Path, staleness: int):
    lives: list[tuple[Any, Any]] = []
    for number, validation in enumerate(
        [
            ValidationConfig(num_prompts=0),
            ValidationConfig(num_prompts=3, interval=1),
            ValidationConfig(num_prompts=5, samples_per_prompt=2, suites=SUITES),
        ]
    ):
        tasks = TASKS if staleness == 0 else IN_ORDER
        rig = Guessing(tmp_path / str(number), 0, tasks=tasks, steps=6, validation=validation, max_staleness=staleness)
        notes = Notes()
        notes.listen(rig.journal)
        await rig.run()
        # With staleness, timing decides which weights answer, but not which samples are trained on.
        lives.append((notes.of(rig.trainer.weights), rig.given if staleness == 0 else None))
    assert lives[0] == lives[1] == lives[2]

from __future__ import annotations

from typing import Any

import pytest

from titan_rl.training.settings import TrainingConfig
from titan_rl.training.trainer import learning_rate


def rate(step: int, *, steps: int, warmup_steps: int = 0, decay: Any = "constant", min_lr_ratio: float = 0.1) -> float:
    training = TrainingConfig(steps=steps, lr=1.0, warmup_steps=warmup_steps, lr_decay=decay, min_lr_ratio=min_lr_ratio)
    return learning_rate(step, training)


def rates(steps: int, **arguments: Any) -> list[float]:
    return [rate(step, steps=steps, **arguments) for step in range(steps)]


def test_constant_schedule_is_full_after_warmup():
    assert rates(steps=4, warmup_steps=2) == [0.5, 1.0, 1.0, 1.0]


def test_linear_schedule_ends_at_the_minimum_rate():
    assert rates(steps=6, warmup_steps=2, decay="linear", min_lr_ratio=0.0) == [0.5, 1.0, 0.75, 0.5, 0.25, 0.0]


def test_cosine_schedule_is_halfway_at_the_midpoint():
    assert rates(steps=5, decay="cosine", min_lr_ratio=0.1) == pytest.approx([1.0, 0.868, 0.55, 0.232, 0.1], abs=1e-3)


@pytest.mark.parametrize("decay", ["constant", "linear", "cosine"])
def test_schedule_of_one_step_and_past_the_end(decay: Any):
    assert rates(steps=1, decay=decay) == [1.0]
    assert rate(9, steps=3, decay=decay, min_lr_ratio=0.5) == rate(2, steps=3, decay=decay, min_lr_ratio=0.5)


def test_decay_may_end_before_the_run():
    training = TrainingConfig(lr=1.0, lr_decay="linear", min_lr_ratio=0.1, steps=9, decay_steps=3)
    assert [learning_rate(step, training) for step in range(5)] == pytest.approx([1.0, 0.55, 0.1, 0.1, 0.1])

"""The learning rate over a run's own steps. Standard library only."""

from __future__ import annotations

import math

from titan_rl.training.choices import LearningRateDecay


def learning_rate(
    step: int, *, steps: int, lr: float, warmup_steps: int, decay: LearningRateDecay, min_lr_ratio: float
) -> float:
    """The learning rate of one optimizer step: a linear warm-up to `lr`, then `decay` down to `lr * min_lr_ratio`.

    The last warm-up step has the full rate; the last step of the run has exactly `lr * min_lr_ratio`, unless the rate
    is constant. Steps past the end keep the last step's rate.

    Args:
        step: counted from 0.
        steps: of the run.

    Example: lr 1.0, 2 warm-up steps, linear to 0.0 over 6 steps gives 0.5, 1.0, 0.75, 0.5, 0.25, 0.0.
    """
    if step < warmup_steps:
        return lr * (step + 1) / warmup_steps
    if decay == "constant":
        return lr
    peak = max(warmup_steps - 1, 0)
    progress = min((step - peak) / max(steps - 1 - peak, 1), 1.0)
    remaining = 1 - progress if decay == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return lr * (min_lr_ratio + (1 - min_lr_ratio) * remaining)

"""The learning rate over a run's own steps. Standard library only."""

from __future__ import annotations

import math

from titan_rl.training.settings import TrainingConfig


def learning_rate(step: int, training: TrainingConfig) -> float:
    """The learning rate of one optimizer step: a linear warm-up, then `lr_decay` down to `min_lr_ratio`.

    The last warm-up step has the full rate; the last step of the run has exactly `lr * min_lr_ratio`, unless the rate
    is constant. Steps past the end keep the last step's rate.

    Args:
        step: counted from 0.

    Example: lr 1.0, 2 warm-up steps, linear to 0.0 over 6 steps gives 0.5, 1.0, 0.75, 0.5, 0.25, 0.0.
    """
    if step < training.warmup_steps:
        return training.lr * (step + 1) / training.warmup_steps
    if training.lr_decay == "constant":
        return training.lr
    peak = max(training.warmup_steps - 1, 0)
    progress = min((step - peak) / max(training.steps - 1 - peak, 1), 1.0)
    remaining = 1 - progress if training.lr_decay == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return training.lr * (training.min_lr_ratio + (1 - training.min_lr_ratio) * remaining)

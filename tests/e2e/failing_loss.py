"""A loss that is not finite."""

from __future__ import annotations

from dataclasses import replace

from titan_rl.training.algorithms.grpo import grpo_loss
from titan_rl.training.losses import ClipRange, LossTokens, TokenLoss


def nan_loss(tokens: LossTokens, clip: ClipRange) -> TokenLoss:
    found = grpo_loss(tokens, clip)
    return replace(found, loss_N=found.loss_N * float("nan"))

"""Policy losses, one a module. `BY_NAME` has those that `training.loss` names."""

from titan_rl.training.losses.cispo import cispo_loss
from titan_rl.training.losses.grpo import grpo_loss
from titan_rl.training.losses.gspo import gspo_loss
from titan_rl.training.losses.reinforce import reinforce_loss
from titan_rl.training.losses.types import ClipRange, LossFn, LossTokens, TokenLoss

BY_NAME: dict[str, LossFn] = {
    "grpo": grpo_loss,
    "gspo": gspo_loss,
    "cispo": cispo_loss,
    "reinforce": reinforce_loss,
}

__all__ = [
    "BY_NAME",
    "ClipRange",
    "LossFn",
    "LossTokens",
    "TokenLoss",
    "cispo_loss",
    "grpo_loss",
    "gspo_loss",
    "reinforce_loss",
]

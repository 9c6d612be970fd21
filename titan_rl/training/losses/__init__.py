"""Policy losses, one a module. `titan_rl.training.losses.registry` has those that `training.loss` names."""

from titan_rl.training.losses.types import ClipRange, LossFn, LossTokens, TokenLoss

__all__ = ["ClipRange", "LossFn", "LossTokens", "TokenLoss"]

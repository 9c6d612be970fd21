"""Losses by name: those of the library, or the user's as "module:function"; and the trial call of a user's loss.

Importing this module imports no loss and no torch: the library's losses are named as a user's are.
"""

from __future__ import annotations

from typing import Any

from titan_rl.core.calls.imports import find_function
from titan_rl.core.calls.user_code import Failure
from titan_rl.training.losses import ClipRange, LossFn, LossTokens, TokenLoss

BY_NAME = {
    "grpo": "titan_rl.training.losses.grpo:grpo_loss",
    "gspo": "titan_rl.training.losses.gspo:gspo_loss",
    "cispo": "titan_rl.training.losses.cispo:cispo_loss",
    "reinforce": "titan_rl.training.losses.reinforce:reinforce_loss",
    "nll": "titan_rl.training.losses.nll:nll_loss",
}
"""Losses of the library, by their names in `training.loss`."""


def find_loss(name: str) -> LossFn:
    """The loss that `training.loss` names.

    Raises:
        ConfigError: there is none of that name.
    """
    found: Any = find_function("training.loss", BY_NAME.get(name, name), BY_NAME)
    return found


def loss_problem(name: str, clip: ClipRange) -> str | None:
    """Problem of the loss that `training.loss` names, found by calling it once on a few tokens, before processes start.
    None for the library's losses, which are not called, and where torch is not installed.

    Raises:
        ConfigError: there is none of that name.
    """
    if name in BY_NAME:
        return None
    try:
        import torch
    except ImportError:
        return None
    logprobs_N = torch.tensor([-1.0, -2.0, -0.5, -1.5], requires_grad=True)
    tokens = LossTokens(
        logprobs_N,
        proximal_logprobs_N=logprobs_N.detach() + torch.tensor([0.0, 0.1, -0.1, 0.5]),
        advantages_N=torch.tensor([1.0, 1.0, -1.0, -1.0]),
        sequences_N=torch.tensor([0, 0, 1, 1]),
        num_sequences=2,
    )
    try:
        made: Any = find_loss(name)(tokens, clip)
        wrong = _problem(made, len(logprobs_N))
    except Exception as error:
        wrong = str(Failure.of(error))
    return None if wrong is None else f"training.loss = {name!r} on four tokens of two sequences: {wrong}"


def _problem(made: Any, num_tokens: int) -> str | None:
    if not isinstance(made, TokenLoss):
        return f"it gave {type(made).__name__}; it must give a TokenLoss"
    for field in ("loss_N", "clipped_N"):
        shape = tuple(getattr(made, field).shape)
        if shape != (num_tokens,):
            return f"{field} has the shape {shape}; it must have a value of each token, ({num_tokens},)"
    if not made.loss_N.isfinite().all():
        return f"loss_N is {made.loss_N.tolist()}; each must be finite"
    if not made.loss_N.requires_grad:
        return "loss_N has no gradient: it must come of tokens.logprobs_N"
    return None

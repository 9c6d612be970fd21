"""Interface of policy losses, and lookup of the loss that `training.loss` names: the library's, or yours as
"module:function".

The library's losses are in the files of `titan_rl.training.algorithms`. Importing this module imports neither these
files nor torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from titan_rl.core.calls.imports import find_function
from titan_rl.core.calls.user_code import Failure

if TYPE_CHECKING:
    import torch

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to this magnitude: exp(20) is finite in every dtype used. Beyond it there is no gradient."""


@dataclass(frozen=True, slots=True)
class LossTokens:
    """Trained tokens of one micro-batch: N tokens of S sequences, all with finite values."""

    logprobs_N: torch.Tensor  # log pi_theta, with gradient
    proximal_logprobs_N: torch.Tensor  # log pi_prox, the policy that ratios are clipped against
    advantages_N: torch.Tensor
    sequences_N: torch.Tensor  # int64 in [0, S): number of each token's sequence
    num_sequences: int

    def log_ratios(self) -> torch.Tensor:
        """Clamped log-ratios log(pi_theta / pi_prox).  # [N]"""
        return (self.logprobs_N - self.proximal_logprobs_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)

    def mean_by_sequence(self, values_N: torch.Tensor) -> torch.Tensor:
        """Mean over the sequence of each token.  # [N]"""
        return mean_by_sequence(values_N, self.sequences_N, self.num_sequences)


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """Loss of each token, not yet averaged: the denominator is that of the whole batch, not of one micro-batch."""

    loss_N: torch.Tensor
    clipped_N: torch.Tensor  # bool: the token's ratio was bounded


@dataclass(frozen=True, slots=True)
class ClipRange:
    """Interval to which ratios are clipped: [1 - low, 1 + high]."""

    low: float
    high: float

    def clamp(self, ratios: torch.Tensor) -> torch.Tensor:
        return ratios.clamp(1 - self.low, 1 + self.high)


LossFn = Callable[[LossTokens, ClipRange], TokenLoss]


def sum_by_sequence(values_N: torch.Tensor, sequences_N: torch.Tensor, num_sequences: int) -> torch.Tensor:
    """Sum over each sequence.  # [S]"""
    return values_N.new_zeros(num_sequences).index_add(0, sequences_N, values_N)


def mean_by_sequence(values_N: torch.Tensor, sequences_N: torch.Tensor, num_sequences: int) -> torch.Tensor:
    """Mean over the sequence of each token.  # [N]"""
    sums_S = sum_by_sequence(values_N, sequences_N, num_sequences)
    counts_S = sum_by_sequence(values_N.new_ones(len(values_N)), sequences_N, num_sequences)
    return (sums_S / counts_S.clamp(min=1))[sequences_N]


def clipped_surrogate(ratios_N: torch.Tensor, tokens: LossTokens, clip: ClipRange) -> TokenLoss:
    """`-min(ratio * A, clip(ratio) * A)`, the clipped objective of PPO (arXiv:1707.06347, eq. 7).

    Args:
        ratios_N: Policy ratios, with gradient.
    """
    free_N = ratios_N * tokens.advantages_N
    bounded_N = clip.clamp(ratios_N) * tokens.advantages_N
    return TokenLoss(-free_N.minimum(bounded_N), (bounded_N < free_N).detach())


def without_bounds(loss_N: torch.Tensor) -> TokenLoss:
    """Wrap the loss of tokens whose ratio is not bounded."""
    return TokenLoss(loss_N, loss_N.detach().new_zeros(len(loss_N)).bool())


BY_NAME = {
    "grpo": "titan_rl.training.algorithms.grpo:grpo_loss",
    "gspo": "titan_rl.training.algorithms.gspo:gspo_loss",
    "cispo": "titan_rl.training.algorithms.cispo:cispo_loss",
    "reinforce": "titan_rl.training.algorithms.reinforce:reinforce_loss",
    "nll": "titan_rl.training.algorithms.sft:nll_loss",
}
"""Losses of the library, by their names in `training.loss`."""


def find_loss(name: str) -> LossFn:
    """Look up the loss that `training.loss` names.

    Raises:
        ConfigError: No loss has that name.
    """
    found: Any = find_function("training.loss", BY_NAME.get(name, name), BY_NAME)
    return found


def loss_problem(name: str, clip: ClipRange) -> str | None:
    """Call a user's loss once on a few tokens, before any process starts, and return what is wrong with it.

    Return None if nothing is wrong, for the library's losses, which are not called, and if torch is not installed.

    Raises:
        ConfigError: No loss has that name.
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
        return f"it returned {type(made).__name__}; it must return a TokenLoss"
    for field in ("loss_N", "clipped_N"):
        shape = tuple(getattr(made, field).shape)
        if shape != (num_tokens,):
            return f"{field} has the shape {shape}; it must have a value for each token, ({num_tokens},)"
    if not made.loss_N.isfinite().all():
        return f"loss_N is {made.loss_N.tolist()}; each must be finite"
    if not made.loss_N.requires_grad:
        return "loss_N has no gradient: it must be computed from tokens.logprobs_N"
    return None

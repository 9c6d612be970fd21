"""Policy losses, one per module, and their arguments and results.

`titan_rl.training.losses.registry` has those that `training.loss` names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to this magnitude: exp(20) is finite in every dtype used. Beyond it there is no gradient."""


@dataclass(frozen=True, slots=True)
class LossTokens:
    """The trained tokens of one micro-batch, all of them finite. N tokens of S sequences."""

    logprobs_N: torch.Tensor  # log pi_theta, with gradient
    proximal_logprobs_N: torch.Tensor  # log pi_prox, what ratios are clipped against
    advantages_N: torch.Tensor
    sequences_N: torch.Tensor  # int64 in [0, S): the sequence that each token is of
    num_sequences: int

    def log_ratios(self) -> torch.Tensor:
        """log(pi_theta / pi_prox), clamped.  # [N]"""
        return (self.logprobs_N - self.proximal_logprobs_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)

    def mean_by_sequence(self, values_N: torch.Tensor) -> torch.Tensor:
        """Each token's sequence's mean.  # [N]"""
        return mean_by_sequence(values_N, self.sequences_N, self.num_sequences)


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """The loss of each token, not yet averaged: the denominator belongs to the whole batch, not to one micro-batch."""

    loss_N: torch.Tensor
    clipped_N: torch.Tensor  # bool: the token's ratio was bounded


@dataclass(frozen=True, slots=True)
class ClipRange:
    """Ratios are clipped to [1 - low, 1 + high]."""

    low: float
    high: float

    def clamp(self, ratios: torch.Tensor) -> torch.Tensor:
        return ratios.clamp(1 - self.low, 1 + self.high)


LossFn = Callable[[LossTokens, ClipRange], TokenLoss]
"""A policy loss. `training.loss` names one of the library's, or yours as "module:function"."""


def sum_by_sequence(values_N: torch.Tensor, sequences_N: torch.Tensor, num_sequences: int) -> torch.Tensor:
    """The sum over each sequence.  # [S]"""
    return values_N.new_zeros(num_sequences).index_add(0, sequences_N, values_N)


def mean_by_sequence(values_N: torch.Tensor, sequences_N: torch.Tensor, num_sequences: int) -> torch.Tensor:
    """The mean over the sequence that each token is of.  # [N]"""
    sums_S = sum_by_sequence(values_N, sequences_N, num_sequences)
    counts_S = sum_by_sequence(values_N.new_ones(len(values_N)), sequences_N, num_sequences)
    return (sums_S / counts_S.clamp(min=1))[sequences_N]

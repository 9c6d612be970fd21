"""Estimates of KL(pi_theta || pi_ref) from a sampled token, with d = log pi_ref - log pi_theta.

Source: Schulman, 2020, "Approximating KL divergence", http://joschu.net/blog/kl-approx.html.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from titan_rl.training.choices import KLEstimate
from titan_rl.training.losses import MAX_LOG_RATIO


def k2(logprobs_N: torch.Tensor, reference_logprobs_N: torch.Tensor) -> torch.Tensor:
    """`d^2 / 2`. On-policy, its gradient is an unbiased estimate of the gradient of the KL divergence.  # [N]"""
    return (reference_logprobs_N - logprobs_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).square() / 2


def k3(logprobs_N: torch.Tensor, reference_logprobs_N: torch.Tensor) -> torch.Tensor:
    """`exp(d) - d - 1`, unbiased and never negative, as GRPO uses it (arXiv:2402.03300, eq. 4).  # [N]"""
    d_N = (reference_logprobs_N - logprobs_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return d_N.exp() - d_N - 1


KLFn = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

ESTIMATES: dict[KLEstimate, KLFn] = {"k2": k2, "k3": k3}
"""Estimates by their names in `training.kl`."""

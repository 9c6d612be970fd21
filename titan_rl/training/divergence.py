"""Divergences in the loss: from a reference model, estimated by the sampled token, and from a teacher.

The estimates of KL(pi_theta || pi_ref) are functions of d = log pi_ref - log pi_theta.

Source: Schulman, 2020, "Approximating KL divergence", http://joschu.net/blog/kl-approx.html.

The divergence from a teacher is over the teacher's K likeliest tokens, with all other tokens merged into one:

    forward   KL(q || p) = sum_k q_k (log q_k - log p_k) + q_0 (log q_0 - log p_0)
    reverse   KL(p || q) = sum_k p_k (log p_k - log q_k) + p_0 (log p_0 - log q_0)

p is the policy, q the teacher, and the index 0 stands for every token outside the teacher's K likeliest: q_0 is 1 minus
the sum of the others. Merging outcomes makes a divergence smaller, so both are lower bounds of the divergence over the
whole vocabulary, at least 0, and equal to it where K is the vocabulary.

Source: GKD, Agarwal et al., 2024, arXiv:2306.13649, eq. 3 (forward and reverse KL on the student's own tokens).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from titan_rl.training.choices import DistillKind, KLEstimate
from titan_rl.training.losses import MAX_LOG_RATIO


def k2(logprobs_N: torch.Tensor, reference_logprobs_N: torch.Tensor) -> torch.Tensor:
    """`d^2 / 2`. On-policy, its gradient is an unbiased estimate of the gradient of the KL divergence.  # [N]"""
    return (reference_logprobs_N - logprobs_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).square() / 2


def k3(logprobs_N: torch.Tensor, reference_logprobs_N: torch.Tensor) -> torch.Tensor:
    """`exp(d) - d - 1`, unbiased and never negative, as GRPO uses it (arXiv:2402.03300, eq. 4).  # [N]"""
    d_N = (reference_logprobs_N - logprobs_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return d_N.exp() - d_N - 1


ESTIMATES: dict[KLEstimate, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {"k2": k2, "k3": k3}
"""Estimates by their names in `training.kl`."""

LEAST_REST = 1e-6
"""Least probability of all other tokens together. Rounding can make it 0 or negative, and its logarithm would not be
finite."""

LEAST_LOGPROB = -50.0
"""Lower limit of logprobs, so that a token that the policy or the teacher excludes does not make the loss infinite."""


def divergence(kind: DistillKind, logprobs_NK: torch.Tensor, teacher_NK: torch.Tensor) -> torch.Tensor:
    """KL divergence of each token, in nats.  # [N]

    Args:
        kind: "forward" or "reverse".
        logprobs_NK: Policy's logprobs of the teacher's likeliest tokens, with gradient.
        teacher_NK: Teacher's logprobs of the same tokens.

    Example: p = [0.5, 0.25] and q = [0.25, 0.5] leave 0.25 to the others in both: 0.1733 nats in either direction.
    """
    policy_NJ, taught_NJ = _with_rest(logprobs_NK), _with_rest(teacher_NK.to(logprobs_NK.dtype))
    if kind == "forward":
        return (taught_NJ.exp() * (taught_NJ - policy_NJ)).sum(-1)
    return (policy_NJ.exp() * (policy_NJ - taught_NJ)).sum(-1)


def _with_rest(logprobs_NK: torch.Tensor) -> torch.Tensor:
    """Append the logprob of all other tokens.  # [N, K + 1]"""
    rest_N1 = (1 - logprobs_NK.exp().sum(-1, keepdim=True)).clamp(min=LEAST_REST).log()
    return torch.cat([logprobs_NK.clamp(min=LEAST_LOGPROB), rest_N1], dim=-1)

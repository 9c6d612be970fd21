"""Policy losses of the library, and the estimates of the KL divergence to a reference model.

Each function documents its formula and source. r_t is pi_theta(t) / pi_prox(t), and sg[] stops the gradient.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from titan_rl.training.choices import KLEstimate
from titan_rl.training.losses import MAX_LOG_RATIO, ClipRange, LossTokens, TokenLoss


def grpo_loss(tokens: LossTokens, clip: ClipRange) -> TokenLoss:
    """Clipped ratio of PPO with asymmetric bounds, as GRPO and DAPO use it.

        loss = -min(r_t * A_t, clip(r_t, 1 - low, 1 + high) * A_t)

    PPO: Schulman et al., 2017, arXiv:1707.06347, eq. 7. Group-relative advantages make it GRPO (Shao et al., 2024,
    arXiv:2402.03300, eq. 3, with `training.average = "sequence"`). Two separate bounds ("clip-higher") and the mean
    over all tokens of the batch make it DAPO (Yu et al., 2025, arXiv:2503.14476, eq. 8 and 12).

    Example: a token of ratio 1.5 and advantage 1 with bounds 0.2 and 0.28 has loss -1.28 and is clipped.
    """
    return _clipped_surrogate(tokens.log_ratios().exp(), tokens, clip)


def gspo_loss(tokens: LossTokens, clip: ClipRange) -> TokenLoss:
    """Group sequence policy optimization: one ratio for each sequence, the geometric mean of its tokens' ratios.

        s    = (pi_theta(y) / pi_prox(y)) ^ (1 / |y|)
        s_t  = sg[s] * pi_theta(t) / sg[pi_theta(t)]            the value of s, the gradient of token t
        loss = -min(s_t * A_t, clip(s_t, 1 - low, 1 + high) * A_t)

    Zheng et al., 2025, arXiv:2507.18071, eq. 13 (the token form, whose gradient is that of eq. 5 when all tokens of a
    sequence share an advantage and `training.average = "sequence"`). Its bounds are far tighter than a token's: 3e-4
    below and 4e-4 above in the paper. Advantages may differ within a sequence; its ratio does not.
    """
    with torch.no_grad():
        mean_N = tokens.mean_by_sequence(tokens.log_ratios())
    ratios_N = (mean_N + tokens.logprobs_N - tokens.logprobs_N.detach()).exp()
    return _clipped_surrogate(ratios_N, tokens, clip)


def _clipped_surrogate(ratios_N: torch.Tensor, tokens: LossTokens, clip: ClipRange) -> TokenLoss:
    free_N = ratios_N * tokens.advantages_N
    bounded_N = clip.clamp(ratios_N) * tokens.advantages_N
    return TokenLoss(-torch.minimum(free_N, bounded_N), (bounded_N < free_N).detach())


def cispo_loss(tokens: LossTokens, clip: ClipRange) -> TokenLoss:
    """Clipped importance-sampling weight: the weight is bounded, and no token loses its gradient.

        loss = -sg[clip(r_t, 1 - low, 1 + high)] * A_t * log pi_theta(t)

    MiniMax-M1, 2025, arXiv:2506.13585, eq. 4 and 5. The paper bounds only from above: `training.clip = [1, HIGH]`.
    `clipped_N` marks the tokens whose weight was bounded; they keep a gradient.
    """
    with torch.no_grad():
        ratios_N = tokens.log_ratios().exp()
        weights_N = clip.clamp(ratios_N)
    return TokenLoss(-weights_N * tokens.advantages_N * tokens.logprobs_N, weights_N != ratios_N)


def reinforce_loss(tokens: LossTokens, clip: ClipRange) -> TokenLoss:
    """Policy gradient without a ratio, so the bounds have no effect.

        loss = -A_t * log pi_theta(t)

    Williams, 1992, Machine Learning 8, eq. 2. Off-policy it needs the weights of `titan_rl.training.corrections`.
    """
    loss_N = -tokens.advantages_N * tokens.logprobs_N
    return TokenLoss(loss_N, torch.zeros_like(loss_N, dtype=torch.bool))


def nll_loss(tokens: LossTokens, clip: ClipRange) -> TokenLoss:
    """Negative log-likelihood: every token is made more probable. Advantages and bounds have no effect.

        loss = -log pi_theta(t)

    Supervised learning of demonstrations, with their mean over all tokens of the batch. On rollouts of which only the
    best are kept it is rejection sampling fine-tuning (RAFT: Dong et al., 2023, arXiv:2304.06767).
    """
    return TokenLoss(-tokens.logprobs_N, torch.zeros_like(tokens.logprobs_N, dtype=torch.bool))


# Estimates of KL(pi_theta || pi_ref) from a sampled token, with d = log pi_ref - log pi_theta: Schulman, 2020,
# "Approximating KL divergence", http://joschu.net/blog/kl-approx.html.


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

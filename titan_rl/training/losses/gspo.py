"""Group sequence policy optimization: one ratio for each sequence, the geometric mean of its tokens' ratios.

    s    = (pi_theta(y) / pi_prox(y)) ^ (1 / |y|)
    s_t  = sg[s] * pi_theta(t) / sg[pi_theta(t)]            the value of s, the gradient of token t
    loss = -min(s_t * A_t, clip(s_t, 1 - low, 1 + high) * A_t)

Zheng et al., 2025, arXiv:2507.18071, eq. 13 (the token form, whose gradient is that of eq. 5 when all tokens of a
sequence share an advantage and `training.average = "sequence"`). Its bounds are far tighter than a token's: 3e-4 below
and 4e-4 above in the paper.
"""

from __future__ import annotations

import torch

from titan_rl.training.losses import ClipRange, LossTokens, TokenLoss


def gspo_loss(tokens: LossTokens, clip: ClipRange) -> TokenLoss:
    """Advantages may differ within a sequence; its ratio does not."""
    with torch.no_grad():
        mean_N = tokens.mean_by_sequence(tokens.log_ratios())
    ratios_N = (mean_N + tokens.logprobs_N - tokens.logprobs_N.detach()).exp()
    free_N = ratios_N * tokens.advantages_N
    bounded_N = clip.clamp(ratios_N) * tokens.advantages_N
    return TokenLoss(-torch.minimum(free_N, bounded_N), (bounded_N < free_N).detach())

"""Clipped importance-sampling weight: the weight is bounded, and no token loses its gradient.

    r_t  = pi_theta(t) / pi_prox(t)
    loss = -sg[clip(r_t, 1 - low, 1 + high)] * A_t * log pi_theta(t)

MiniMax-M1, 2025, arXiv:2506.13585, eq. 4 and 5. The paper bounds only from above: `training.clip_low = 1`.
"""

from __future__ import annotations

import torch

from titan_rl.training.losses import ClipRange, LossTokens, TokenLoss


def cispo_loss(tokens: LossTokens, clip: ClipRange) -> TokenLoss:
    """`clipped_N` marks the tokens whose weight was bounded; they keep a gradient."""
    with torch.no_grad():
        ratios_N = tokens.log_ratios().exp()
        weights_N = clip.clamp(ratios_N)
    return TokenLoss(-weights_N * tokens.advantages_N * tokens.logprobs_N, weights_N != ratios_N)

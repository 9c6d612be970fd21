"""The policy gradient without a ratio.

    loss = -A_t * log pi_theta(t)

Williams, 1992, Machine Learning 8, eq. 2. Off-policy it needs the weights of `titan_rl.training.corrections`.
"""

from __future__ import annotations

import torch

from titan_rl.training.losses import ClipRange, LossTokens, TokenLoss


def reinforce_loss(tokens: LossTokens, clip: ClipRange) -> TokenLoss:
    """Nothing is clipped; the bounds play no part."""
    loss_N = -tokens.advantages_N * tokens.logprobs_N
    return TokenLoss(loss_N, torch.zeros_like(loss_N, dtype=torch.bool))

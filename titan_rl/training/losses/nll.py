"""The negative log-likelihood: what was said is made more probable, whatever it was worth.

    loss = -log pi_theta(t)

Supervised learning of demonstrations, with their mean over all tokens of the batch. On rollouts of which only the best
are kept it is rejection sampling fine-tuning (RAFT: Dong et al., 2023, arXiv:2304.06767).
"""

from __future__ import annotations

import torch

from titan_rl.training.losses import ClipRange, LossTokens, TokenLoss


def nll_loss(tokens: LossTokens, clip: ClipRange) -> TokenLoss:
    """Neither advantages nor the bounds play a part, and nothing is clipped."""
    return TokenLoss(-tokens.logprobs_N, torch.zeros_like(tokens.logprobs_N, dtype=torch.bool))

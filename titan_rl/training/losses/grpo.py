"""The clipped ratio of PPO with asymmetric bounds, as GRPO and DAPO use it.

    r_t  = pi_theta(t) / pi_prox(t)
    loss = -min(r_t * A_t, clip(r_t, 1 - low, 1 + high) * A_t)

PPO: Schulman et al., 2017, arXiv:1707.06347, eq. 7. Group-relative advantages make it GRPO (Shao et al., 2024,
arXiv:2402.03300, eq. 3, with `training.average = "sequence"`); two separate bounds ("clip-higher") and the mean over
all tokens of the batch make it DAPO (Yu et al., 2025, arXiv:2503.14476, eq. 8 and 12).
"""

from __future__ import annotations

import torch

from titan_rl.training.losses import ClipRange, LossTokens, TokenLoss


def grpo_loss(tokens: LossTokens, clip: ClipRange) -> TokenLoss:
    """Example: a token of ratio 1.5 and advantage 1 with bounds 0.2 and 0.28 has loss -1.28 and is clipped."""
    ratios_N = tokens.log_ratios().exp()
    free_N = ratios_N * tokens.advantages_N
    bounded_N = clip.clamp(ratios_N) * tokens.advantages_N
    return TokenLoss(-torch.minimum(free_N, bounded_N), (bounded_N < free_N).detach())

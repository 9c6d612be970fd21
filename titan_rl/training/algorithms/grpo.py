"""GRPO: group-relative advantages, and the clipped ratio of PPO.

    A_i  = (r_i - mean(r)) / (std(r) + 1e-6)
    loss = -min(r_t * A_i, clip(r_t, 1 - low, 1 + high) * A_i),    r_t = pi_theta(t) / pi_prox(t)

Sources: Shao et al., 2024, arXiv:2402.03300, eq. 3 (GRPO), on Schulman et al., 2017, arXiv:1707.06347, eq. 7 (PPO). Two
separate bounds ("clip-higher") and the mean over all tokens of the batch are those of DAPO (Yu et al., 2025,
arXiv:2503.14476, eq. 8 and 12). The paper of GRPO has average = "sequence", clip = [0.2, 0.2] and kl_coef = 0.04.
"""

from __future__ import annotations

from titan_rl.training.algorithms.algorithm import Algorithm
from titan_rl.training.losses import ClipRange, LossTokens, TokenLoss, clipped_surrogate


def grpo_loss(tokens: LossTokens, clip: ClipRange) -> TokenLoss:
    """Clipped ratio of each token.

    Example: a token of ratio 1.5 and advantage 1 with bounds 0.2 and 0.28 has loss -1.28 and is clipped.
    """
    return clipped_surrogate(tokens.log_ratios().exp(), tokens, clip)


GRPO = Algorithm(
    about="The default: compares siblings in units of their standard deviation, and clips the ratio of each token.",
    source="GRPO, arXiv:2402.03300, eq. 3, with the bounds and the mean over tokens of DAPO, arXiv:2503.14476, eq. 8",
    loss=grpo_loss,
    loss_formula="-min(r * A, clip(r, 1 - low, 1 + high) * A)",
    average="token",
    clip=(0.2, 0.28),
    needs="rollout.group_size of at least 2, and rewards that differ between siblings",
)

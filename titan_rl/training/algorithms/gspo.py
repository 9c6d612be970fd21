"""GSPO, group sequence policy optimization: one ratio for each sequence, the geometric mean of its tokens' ratios.

    A_i  = (r_i - mean(r)) / (std(r) + 1e-6)
    s    = (pi_theta(y) / pi_prox(y)) ^ (1 / |y|)
    s_t  = sg[s] * pi_theta(t) / sg[pi_theta(t)]            the value of s, the gradient of token t
    loss = -min(s_t * A_i, clip(s_t, 1 - low, 1 + high) * A_i)

Source: Zheng et al., 2025, arXiv:2507.18071, eq. 13 (the token form, whose gradient is that of eq. 5 when all tokens of
a sequence share an advantage). Its bounds are far tighter than those of a token.
"""

from __future__ import annotations

from titan_rl.training.algorithms.algorithm import Algorithm
from titan_rl.training.losses import ClipRange, LossTokens, TokenLoss, clipped_surrogate


def gspo_loss(tokens: LossTokens, clip: ClipRange) -> TokenLoss:
    """Clipped ratio of the sequence. Advantages may differ within a sequence; its ratio does not."""
    mean_N = tokens.mean_by_sequence(tokens.log_ratios().detach())
    ratios_N = (mean_N + tokens.logprobs_N - tokens.logprobs_N.detach()).exp()
    return clipped_surrogate(ratios_N, tokens, clip)


GSPO = Algorithm(
    about="Clips the ratio of whole sequences, which is steadier for long answers and mixtures of experts.",
    source="GSPO, arXiv:2507.18071, eq. 13",
    loss=gspo_loss,
    loss_formula="-min(s * A, clip(s, 1 - low, 1 + high) * A), s = (pi_theta(y) / pi_prox(y)) ^ (1 / |y|)",
    average="sequence",
    clip=(3e-4, 4e-4),
    needs="rollout.group_size of at least 2, and rewards that differ between siblings",
)

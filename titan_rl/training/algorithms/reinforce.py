"""REINFORCE: the policy gradient with the mean reward of the batch as baseline.

    A_i  = r_i - mean(r), over the batch
    loss = -A_i * log pi_theta(t)

Source: Williams, 1992, Machine Learning 8, eq. 2. There is no ratio: tokens of older weights need [correction], such as
proximal = "recomputed", weight = "token" and cap = 2.
"""

from __future__ import annotations

from titan_rl.rollout.rewards.advantages import batch_mean
from titan_rl.training.algorithms.algorithm import Algorithm
from titan_rl.training.losses import ClipRange, LossTokens, TokenLoss, without_bounds


def reinforce_loss(tokens: LossTokens, clip: ClipRange) -> TokenLoss:
    """Policy gradient without a ratio, so the bounds have no effect."""
    return without_bounds(-tokens.advantages_N * tokens.logprobs_N)


REINFORCE = Algorithm(
    about="The plain policy gradient; it also learns from groups of one rollout.",
    source="REINFORCE, Williams, 1992, Machine Learning 8, eq. 2",
    advantage=batch_mean,
    advantage_formula="r_i - mean(r), over the batch of a task",
    loss=reinforce_loss,
    loss_formula="-A * log pi_theta",
    average="token",
    needs="scheduling.max_staleness = 0, or a [correction] of tokens that older weights sampled",
)

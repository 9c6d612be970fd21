"""Supervised fine-tuning: every trained token is made more probable, regardless of its reward.

    loss = -log pi_theta(t)

`titan-rl sft` trains on demonstrations with it. On rollouts of which filters keep only the best, it is rejection
sampling fine-tuning (RAFT: Dong et al., 2023, arXiv:2304.06767).
"""

from __future__ import annotations

from titan_rl.rollout.rewards.advantages import reward
from titan_rl.training.algorithms.algorithm import Algorithm
from titan_rl.training.losses import ClipRange, LossTokens, TokenLoss, without_bounds


def nll_loss(tokens: LossTokens, clip: ClipRange) -> TokenLoss:
    """Negative log-likelihood. Advantages and bounds have no effect."""
    return without_bounds(-tokens.logprobs_N)


SFT = Algorithm(
    about="Imitates every rollout that the filters keep.",
    source="maximum likelihood; RAFT, arXiv:2304.06767, on rollouts that scheduling.filters select",
    advantage=reward,
    advantage_formula="r_i, without effect on the loss",
    loss=nll_loss,
    loss_formula="-log pi_theta",
    average="token",
    needs="demonstrations, or filters that keep only good groups",
)

"""RAE, role-conditioned advantage estimation: REINFORCE with a moving baseline for each role of a game.

    A_i    = r_i - b_role
    loss   = -A_i * log pi_theta(t)
    b_role = 0.95 * b_role + 0.05 * r_i, after each rollout

The roles of a game have different chances: the first to move may win more often. A baseline over both roles would
reinforce every action of one and none of the other. Source: Liu et al., 2025, arXiv:2506.24119 (SPIRAL), section 3.3.
The paper updates the baseline with a rollout before it is subtracted from its reward; here the baselines are those
before the batch, so that the estimate has no bias. They are saved in checkpoints.

There is no ratio: tokens of older weights need [correction], or another loss, such as loss = "grpo".
"""

from __future__ import annotations

from titan_rl.rollout.rewards.advantages import role_baseline
from titan_rl.training.algorithms.algorithm import Algorithm
from titan_rl.training.algorithms.reinforce import reinforce_loss

RAE = Algorithm(
    about="For games: the policy gradient with a moving average of the rewards of each role as baseline.",
    source="RAE of SPIRAL, arXiv:2506.24119, section 3.3",
    advantage=role_baseline,
    advantage_formula="r_i - b_role, and b_role = 0.95 * b_role + 0.05 * r_i after each rollout",
    loss=reinforce_loss,
    loss_formula="-A * log pi_theta",
    average="token",
    needs="scheduling.max_staleness = 0, or a [correction] of tokens that older weights sampled",
)

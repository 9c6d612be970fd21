"""RLOO, REINFORCE leave-one-out: the baseline of a rollout is the mean reward of its siblings.

    A_i  = r_i - mean(r_j, j != i)
    loss = -A_i * log pi_theta(t)

Source: Ahmadian et al., 2024, arXiv:2402.14740, eq. 8. The paper sums over a sequence; so does average = "constant",
up to a constant that the optimizer's normalization absorbs.
"""

from __future__ import annotations

from titan_rl.rollout.rewards.advantages import leave_one_out
from titan_rl.training.algorithms.algorithm import Algorithm
from titan_rl.training.algorithms.reinforce import reinforce_loss

RLOO = Algorithm(
    about="The policy gradient with an unbiased baseline for each rollout, the mean of the others.",
    source="RLOO, arXiv:2402.14740, eq. 8",
    advantage=leave_one_out,
    advantage_formula="r_i - mean(r_j, j != i), over the siblings of a group",
    loss=reinforce_loss,
    loss_formula="-A * log pi_theta",
    average="constant",
    needs="rollout.group_size of at least 2; scheduling.max_staleness = 0, or a [correction] of tokens that older "
    "weights sampled",
)

"""Dr. GRPO: GRPO without the biases of its two normalizations.

    A_i  = r_i - mean(r)
    loss = -min(r_t * A_i, clip(r_t, 1 - low, 1 + high) * A_i)

GRPO divides advantages by the standard deviation, which favours questions that are nearly always or never solved, and
the loss of a sequence by its length, which makes long wrong answers cheap. Here a constant divides the sum over a
sequence. Source: Liu et al., 2025, arXiv:2503.20783, section 3.2.
"""

from __future__ import annotations

from titan_rl.rollout.rewards.advantages import group_mean
from titan_rl.training.algorithms.algorithm import Algorithm
from titan_rl.training.algorithms.grpo import grpo_loss

DR_GRPO = Algorithm(
    about="GRPO that divides neither by the standard deviation nor by the length of an answer.",
    source="Dr. GRPO, arXiv:2503.20783, section 3.2",
    advantage=group_mean,
    advantage_formula="r_i - mean(r), over the siblings of a group",
    loss=grpo_loss,
    loss_formula="-min(r * A, clip(r, 1 - low, 1 + high) * A)",
    average="constant",
    clip=(0.2, 0.2),
    needs="rollout.group_size of at least 2, and rewards that differ between siblings",
)

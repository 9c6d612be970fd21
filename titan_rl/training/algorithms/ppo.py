"""PPO: per-token advantages from a critic, by generalized advantage estimation, and the clipped ratio.

    delta_t = R_t + gamma * V(s_{t+1}) - V(s_t)
    A_t     = sum_l (gamma * lambda)^l * delta_{t+l},    standardized over the batch
    loss    = -min(r_t * A_t, clip(r_t, 1 - low, 1 + high) * A_t),    r_t = pi_theta(t) / pi_prox(t)

The critic V is trained alongside the policy, with its own optimizer and loss: `titan_rl.training.critic`. The
reward R of a rollout is at its last token, and rewards that the environment gives in a turn are at the end of the turn.
`titan_rl.training.gae` has the treatment of turns and truncated rollouts. No siblings are compared, so groups of one
rollout are enough.

Sources: Schulman et al., 2016, arXiv:1506.02438, eq. 16 (GAE); Schulman et al., 2017, arXiv:1707.06347, eq. 7 and 9
(PPO); Ouyang et al., 2022, arXiv:2203.02155 (a critic initialized from a language model).
"""

from __future__ import annotations

from titan_rl.rollout.rewards.advantages import reward
from titan_rl.training.algorithms.algorithm import Algorithm
from titan_rl.training.algorithms.grpo import grpo_loss

PPO = Algorithm(
    about="Learns the value of each state, so that every token has its own advantage, even in groups of one rollout.",
    source="PPO, arXiv:1707.06347, eq. 7 and 9, with GAE, arXiv:1506.02438, eq. 16",
    advantage=reward,
    advantage_formula="r_i, and A_t = sum_l (gamma * lambda)^l * (R_{t+l} + gamma * V_{t+l+1} - V_{t+l}), standardized",
    loss=grpo_loss,
    loss_formula="-min(r * A, clip(r, 1 - low, 1 + high) * A)",
    average="token",
    clip=(0.2, 0.2),
    critic="model",
)

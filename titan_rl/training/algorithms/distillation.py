"""On-policy distillation: a teacher scores the tokens that the policy has sampled, instead of a reward.

    A_t  = log pi_T(t) - log pi_b(t)
    loss = -min(r_t * A_t, clip(r_t, 1 - low, 1 + high) * A_t),    r_t = pi_theta(t) / pi_prox(t)

-A_t is an estimate of the reverse KL divergence KL(pi_theta || pi_T) on the sampled token, and its policy gradient
lowers that divergence. With distill = "forward" or "reverse" the divergence over the teacher's top tokens is a
term of the loss instead:

    loss = distill_coef * sum_t KL(t) / T,    T the number of scored tokens

Sources: Agarwal et al., 2024, arXiv:2306.13649 (GKD: divergences on the student's own samples); Gu et al., 2024,
arXiv:2306.08543, eq. 2 (reverse KL by the policy gradient); Lu and Thinking Machines Lab, 2025, "On-Policy
Distillation" (the estimate on the sampled token as its advantage).

To learn from rewards as well, combine distillation with another advantage: algorithm = "grpo" with distill_coef = 0.5,
or this algorithm with advantage = "standardized".
"""

from __future__ import annotations

from titan_rl.rollout.rewards.advantages import zero
from titan_rl.training.algorithms.algorithm import Algorithm
from titan_rl.training.algorithms.grpo import grpo_loss

DISTILLATION = Algorithm(
    about="Learns from a teacher's logprobs of the policy's own tokens. Rewards are recorded but not used.",
    source="GKD, arXiv:2306.13649; MiniLLM, arXiv:2306.08543, eq. 2; On-Policy Distillation, Thinking Machines, 2025",
    advantage=zero,
    advantage_formula="0, and A_t = log pi_T(t) - log pi_b(t) for each token",
    loss=grpo_loss,
    loss_formula="-min(r * A, clip(r, 1 - low, 1 + high) * A)",
    average="token",
    clip=(0.2, 0.28),
    distill_coef=1.0,
    distill="sampled",
)

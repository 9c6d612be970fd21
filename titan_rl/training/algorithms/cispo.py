"""CISPO, clipped importance-sampling weights: the weight of a token is bounded, and no token loses its gradient.

    A_i  = (r_i - mean(r)) / (std(r) + 1e-6)
    loss = -sg[clip(r_t, 1 - low, 1 + high)] * A_i * log pi_theta(t)

Source: MiniMax-M1, 2025, arXiv:2506.13585, eq. 4 and 5. It bounds only from above; low = 1 is no lower bound.
"""

from __future__ import annotations

from titan_rl.training.algorithms.algorithm import Algorithm
from titan_rl.training.losses import ClipRange, LossTokens, TokenLoss


def cispo_loss(tokens: LossTokens, clip: ClipRange) -> TokenLoss:
    """Policy gradient with a bounded weight. `clipped_N` marks the bounded tokens, which keep a gradient."""
    ratios_N = tokens.log_ratios().detach().exp()
    weights_N = clip.clamp(ratios_N)
    return TokenLoss(-weights_N * tokens.advantages_N * tokens.logprobs_N, weights_N != ratios_N)


CISPO = Algorithm(
    about="Bounds the importance weight of a token instead of its ratio, so that rare tokens keep a gradient.",
    source="CISPO, arXiv:2506.13585, eq. 4 and 5",
    loss=cispo_loss,
    loss_formula="-sg[clip(r, 1 - low, 1 + high)] * A * log pi_theta",
    average="token",
    clip=(1.0, 0.28),
    needs="rollout.group_size of at least 2, and rewards that differ between siblings",
)

"""The GRPO token loss with asymmetric clipping, and the logprobs it is made of.

For a token sampled with behaviour logprob b, scored now as p, with advantage A:

    ratio = exp(p - b)
    loss  = -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)

The ratio and its clip are those of PPO (Schulman et al., 2017, arXiv:1707.06347, eq. 7), the group-relative advantage
is GRPO's (Shao et al., 2024, arXiv:2402.03300), and the two separate bounds ("clip-higher") and the mean over all
tokens of the batch rather than over sequences are DAPO's (Yu et al., 2025, arXiv:2503.14476, eq. 8 and 12).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to this magnitude: exp(20) is finite in every dtype used. Beyond it there is no gradient."""


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """The loss of each trained token. Where `valid` is False the loss is 0 and sends no gradient.  # all [N]"""

    loss_N: torch.Tensor
    valid_N: torch.Tensor  # bool: behaviour logprob and ratio are finite
    log_ratio_N: torch.Tensor  # detached, 0 where not valid
    clipped_N: torch.Tensor  # bool: the clipped term is the smaller one, so the token sends no gradient


def grpo_loss(
    logprobs_N: torch.Tensor,
    behaviour_logprobs_N: torch.Tensor,
    advantages_N: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> TokenLoss:
    """The loss of each token, not yet averaged: the denominator belongs to the whole batch, not to one micro-batch.

    Example: `grpo_loss(log([0.6]), log([0.4]), [1.0], clip_low=0.2, clip_high=0.28)` has the ratio 1.5, so the loss is
    -1.28 and the token is clipped.
    """
    # A value that is not finite must be replaced before the arithmetic: zero times its gradient would still be NaN.
    raw_N = logprobs_N.detach() - behaviour_logprobs_N
    valid_N = torch.isfinite(raw_N)
    log_ratio_N = torch.where(valid_N, logprobs_N - behaviour_logprobs_N.where(valid_N, 0.0), 0.0)
    ratio_N = log_ratio_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    bounded_N = ratio_N.clamp(1 - clip_low, 1 + clip_high)
    advantages_N = advantages_N.where(valid_N, 0.0)
    loss_N = -torch.minimum(ratio_N * advantages_N, bounded_N * advantages_N)
    with torch.no_grad():
        clipped_N = bounded_N * advantages_N < ratio_N * advantages_N
    return TokenLoss(loss_N, valid_N, log_ratio_N.detach(), clipped_N)


def selected_logprobs(
    logits_NV: torch.Tensor, targets_N: torch.Tensor, temperatures_N: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logprobs of the targets and the entropy of the whole distribution, both at each token's temperature.

    Computed in float32. The entropy is a metric and carries no gradient.

    Returns:
        logprobs and entropies in nats.  # [N], [N]
    """
    logprobs_N, entropies_N = _SelectedLogprobs.apply(logits_NV, targets_N, temperatures_N)
    return logprobs_N, entropies_N


class _SelectedLogprobs(torch.autograd.Function):
    """One exponential per logit serves the logprob, the entropy and the gradient."""

    @staticmethod
    def forward(ctx: Any, logits_NV: torch.Tensor, targets_N: torch.Tensor, temperatures_N: torch.Tensor) -> Any:
        scaled_NV = logits_NV.float() / temperatures_N[:, None]
        shifted_NV = scaled_NV.sub_(scaled_NV.amax(-1, keepdim=True))
        probs_NV = shifted_NV.exp()
        sums_N1 = probs_NV.sum(-1, keepdim=True)
        probs_NV /= sums_N1
        log_sums_N = sums_N1.squeeze(-1).log()
        logprobs_N = shifted_NV.gather(-1, targets_N[:, None]).squeeze(-1) - log_sums_N
        entropies_N = log_sums_N - torch.linalg.vecdot(probs_NV, shifted_NV)
        ctx.save_for_backward(probs_NV, targets_N, temperatures_N)
        ctx.mark_non_differentiable(entropies_N)
        ctx.dtype = logits_NV.dtype
        return logprobs_N, entropies_N

    @staticmethod
    def backward(ctx: Any, grad_N: torch.Tensor, _: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        probs_NV, targets_N, temperatures_N = ctx.saved_tensors
        scaled_N1 = (grad_N / temperatures_N)[:, None]
        grad_NV = probs_NV * -scaled_N1
        grad_NV.scatter_add_(-1, targets_N[:, None], scaled_N1)
        return grad_NV.to(ctx.dtype), None, None

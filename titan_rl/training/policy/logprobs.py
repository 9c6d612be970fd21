"""Logprobs and entropies of the tokens that are trained."""

from __future__ import annotations

from typing import Any

import torch


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

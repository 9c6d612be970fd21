"""Log probabilities of selected tokens, scored in chunks. This file needs only torch.

The logits of all tokens would be the largest tensors of training: 14 bytes for each token and vocabulary entry. So
tokens are scored in chunks, and the backward pass recomputes their logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

CHUNK_LOGITS = 2**26
"""Most logits of a chunk: 256 MiB in float32. Logits that fit in one chunk are kept for the backward pass."""


@dataclass(frozen=True, slots=True)
class VocabularyShard:
    """Part of the vocabulary for which a rank has the logits."""

    start: int  # the first entry
    mesh: Any  # of the ranks that share the vocabulary

    def reduce(self, tensor: torch.Tensor, operation: Any = dist.ReduceOp.SUM) -> None:
        """All-reduce over these ranks, in place."""
        dist.all_reduce(tensor, operation, group=self.mesh.get_group())


def selected_logprobs(
    hidden_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    targets_N: torch.Tensor,
    temperatures_N: torch.Tensor,
    *,
    shard: VocabularyShard | None = None,
    chunk_logits: int = CHUNK_LOGITS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logprobs of the targets and the entropy of the whole distribution, both at each place's temperature.

    Logits are computed in the dtype of the hidden states, everything from there on in float32. The entropy is a metric
    and carries no gradient.

    Args:
        targets_N: one token for each place, or several: [N, J].
        weight_VD: weights of the output layer, or this rank's rows of them.
        shard: position of these rows. The ranks of its mesh call this together, with the same tokens, and all get the
            results.
        chunk_logits: most logits of a chunk.

    Returns:
        logprobs in the shape of the targets, and entropies, in nats.  # [N] or [N, J], [N]
    """
    chunk = max(1, chunk_logits // max(1, len(weight_VD)))
    targets_NJ = targets_N if targets_N.dim() == 2 else targets_N[:, None]
    logprobs_NJ, entropies_N = _SelectedLogprobs.apply(hidden_ND, weight_VD, targets_NJ, temperatures_N, shard, chunk)
    return logprobs_NJ.view(targets_N.shape), entropies_N


class _SelectedLogprobs(torch.autograd.Function):
    """One exponential per logit serves the logprob, the entropy and the gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: torch.Tensor,
        weight_VD: torch.Tensor,
        targets_NJ: torch.Tensor,
        temperatures_N: torch.Tensor,
        shard: VocabularyShard | None,
        chunk: int,
    ) -> Any:
        size = len(targets_NJ)
        logprobs_NJ = torch.empty(targets_NJ.shape, device=hidden_ND.device)
        entropies_N = torch.empty(size, device=hidden_ND.device)
        probs_NV = None
        for rows in _chunks(size, chunk):
            shifted_NV, probs_NV, log_sums_N = _distribution(hidden_ND[rows], weight_VD, temperatures_N[rows], shard)
            at_NJ, is_here_NJ = _places(targets_NJ[rows], weight_VD, shard)
            chosen_NJ = shifted_NV.gather(-1, at_NJ) * is_here_NJ
            expected_N = torch.linalg.vecdot(probs_NV, shifted_NV)
            if shard is not None:
                shard.reduce(chosen_NJ)
                shard.reduce(expected_N)
            logprobs_NJ[rows] = chosen_NJ - log_sums_N[:, None]
            entropies_N[rows] = log_sums_N - expected_N
        ctx.save_for_backward(hidden_ND, weight_VD, targets_NJ, temperatures_N, probs_NV if size <= chunk else None)
        ctx.shard, ctx.chunk = shard, chunk
        ctx.mark_non_differentiable(entropies_N)
        return logprobs_NJ, entropies_N

    @staticmethod
    def backward(ctx: Any, grad_NJ: torch.Tensor, _: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden_ND, weight_VD, targets_NJ, temperatures_N, kept_NV = ctx.saved_tensors
        grad_hidden_ND = torch.zeros_like(hidden_ND)
        grad_weight_VD = None
        for rows in _chunks(len(targets_NJ), ctx.chunk):
            probs_NV = kept_NV
            if probs_NV is None:
                _, probs_NV, _ = _distribution(hidden_ND[rows], weight_VD, temperatures_N[rows], ctx.shard)
            at_NJ, is_here_NJ = _places(targets_NJ[rows], weight_VD, ctx.shard)
            scaled_NJ = grad_NJ[rows] / temperatures_N[rows, None]
            grad_NV = probs_NV * -scaled_NJ.sum(-1, keepdim=True)
            grad_NV.scatter_add_(-1, at_NJ, scaled_NJ * is_here_NJ)
            grad_NV = grad_NV.to(hidden_ND.dtype)
            grad_hidden_ND[rows] = grad_NV @ weight_VD
            # No name keeps the product of a chunk, which is as large as the weight, until the result is converted.
            if grad_weight_VD is None:
                grad_weight_VD = (grad_NV.T @ hidden_ND[rows]).float()
            else:
                grad_weight_VD += grad_NV.T @ hidden_ND[rows]
        if ctx.shard is not None:
            ctx.shard.reduce(grad_hidden_ND)
        if grad_weight_VD is None:
            grad_weight_VD = torch.zeros_like(weight_VD)
        return grad_hidden_ND, grad_weight_VD.to(weight_VD.dtype), None, None, None, None


def _chunks(size: int, chunk: int) -> Iterator[slice]:
    return (slice(start, start + chunk) for start in range(0, size, chunk))


def _distribution(
    hidden_ND: torch.Tensor, weight_VD: torch.Tensor, temperatures_N: torch.Tensor, shard: VocabularyShard | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits minus the maximum over the whole vocabulary, their probabilities, and the log-normalizers that turn the
    former into logprobs.  # [N, V], [N, V], [N]"""
    scaled_NV = F.linear(hidden_ND, weight_VD).float().div_(temperatures_N[:, None])
    greatest_N1 = scaled_NV.amax(-1, keepdim=True)
    if shard is not None:
        shard.reduce(greatest_N1, dist.ReduceOp.MAX)
    shifted_NV = scaled_NV.sub_(greatest_N1)
    probs_NV = shifted_NV.exp()
    sums_N1 = probs_NV.sum(-1, keepdim=True)
    if shard is not None:
        shard.reduce(sums_N1)
    probs_NV /= sums_N1
    return shifted_NV, probs_NV, sums_N1.squeeze(-1).log()


def _places(
    targets_NJ: torch.Tensor, weight_VD: torch.Tensor, shard: VocabularyShard | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions of the targets' logits on this rank, and whether it has them.  # int64 [N, J], bool [N, J]"""
    at_NJ = targets_NJ - (shard.start if shard else 0)
    is_here_NJ = (at_NJ >= 0) & (at_NJ < len(weight_VD))
    return at_NJ.where(is_here_NJ, 0), is_here_NJ

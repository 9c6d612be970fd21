"""Log probabilities of selected tokens, computed in chunks. This file needs only torch.

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
"""Maximum number of logits of a chunk: 256 MiB in float32. If all logits fit in one chunk, they are kept for the
backward pass."""


@dataclass(frozen=True, slots=True)
class VocabularyShard:
    """Part of the vocabulary for which a rank has the logits."""

    start: int  # the first entry
    mesh: Any  # mesh of the ranks that share the vocabulary

    def reduce(self, tensor: torch.Tensor, operation: Any = dist.ReduceOp.SUM) -> None:
        """All-reduce a tensor over the ranks that share the vocabulary, in place."""
        dist.all_reduce(tensor, operation, group=self.mesh.get_group())


def selected_logprobs(
    hidden_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    targets_N: torch.Tensor,
    temperatures_N: torch.Tensor,
    *,
    bias_V: torch.Tensor | None = None,
    softcap: float | None = None,
    shard: VocabularyShard | None = None,
    chunk_logits: int = CHUNK_LOGITS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logprobs of the targets and entropies of the whole distributions, both at the temperature of each position.

    Logits are computed in the dtype of the hidden states, and everything after them in float32, or in float64 if the
    logits are float64. The entropy is a metric and carries no gradient.

    Args:
        targets_N: Token id for each position, or several of them: [N, J].
        weight_VD: Weights of the output layer, or this rank's rows of the weights.
        bias_V: Biases of the output layer.
        softcap: Bound of the logits: x becomes softcap * tanh(x / softcap), before the temperature is applied.
        shard: Position of this rank's rows in the vocabulary. The ranks of its mesh call this together, with the same
            tokens, and all get the whole results.
        chunk_logits: Maximum number of logits of a chunk.

    Returns:
        Logprobs in the shape of the targets, and entropies, both in nats.  # [N] or [N, J], [N]
    """
    chunk = max(1, chunk_logits // max(1, len(weight_VD)))
    targets_NJ = targets_N if targets_N.dim() == 2 else targets_N[:, None]
    logprobs_NJ, entropies_N = _SelectedLogprobs.apply(
        hidden_ND, weight_VD, bias_V, targets_NJ, temperatures_N, softcap, shard, chunk
    )
    return logprobs_NJ.view(targets_N.shape), entropies_N


class _SelectedLogprobs(torch.autograd.Function):
    """Implementation of `selected_logprobs`. Logprob, entropy and gradient share one exponential per logit."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: torch.Tensor,
        weight_VD: torch.Tensor,
        bias_V: torch.Tensor | None,
        targets_NJ: torch.Tensor,
        temperatures_N: torch.Tensor,
        softcap: float | None,
        shard: VocabularyShard | None,
        chunk: int,
    ) -> Any:
        size = len(targets_NJ)
        dtype = torch.promote_types(hidden_ND.dtype, torch.float32)
        logprobs_NJ = torch.empty(targets_NJ.shape, device=hidden_ND.device, dtype=dtype)
        entropies_N = torch.empty(size, device=hidden_ND.device, dtype=dtype)
        probs_NV = None
        for rows in _chunks(size, chunk):
            shifted_NV, probs_NV, log_sums_N, _ = _distribution(
                hidden_ND[rows], weight_VD, bias_V, temperatures_N[rows], softcap, shard
            )
            at_NJ, is_here_NJ = _local_positions(targets_NJ[rows], weight_VD, shard)
            chosen_NJ = shifted_NV.gather(-1, at_NJ) * is_here_NJ
            expected_N = torch.linalg.vecdot(probs_NV, shifted_NV)
            if shard is not None:
                shard.reduce(chosen_NJ)
                shard.reduce(expected_N)
            logprobs_NJ[rows] = chosen_NJ - log_sums_N[:, None]
            entropies_N[rows] = log_sums_N - expected_N
        kept_NV = probs_NV if size <= chunk and softcap is None else None  # the slope of a cap needs the logits
        ctx.save_for_backward(hidden_ND, weight_VD, bias_V, targets_NJ, temperatures_N, kept_NV)
        ctx.softcap, ctx.shard, ctx.chunk = softcap, shard, chunk
        ctx.mark_non_differentiable(entropies_N)
        return logprobs_NJ, entropies_N

    @staticmethod
    def backward(ctx: Any, grad_NJ: torch.Tensor, _: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden_ND, weight_VD, bias_V, targets_NJ, temperatures_N, kept_NV = ctx.saved_tensors
        shard: VocabularyShard | None = ctx.shard
        grad_hidden_ND = torch.zeros_like(hidden_ND)
        grad_weight_VD = None
        grad_bias_V = None if bias_V is None else torch.zeros_like(bias_V)
        for rows in _chunks(len(targets_NJ), ctx.chunk):
            probs_NV, slope_NV = kept_NV, None
            if probs_NV is None:
                _, probs_NV, _, slope_NV = _distribution(
                    hidden_ND[rows], weight_VD, bias_V, temperatures_N[rows], ctx.softcap, shard
                )
            at_NJ, is_here_NJ = _local_positions(targets_NJ[rows], weight_VD, shard)
            scaled_NJ = grad_NJ[rows] / temperatures_N[rows, None]
            grad_NV = probs_NV * -scaled_NJ.sum(-1, keepdim=True)
            grad_NV.scatter_add_(-1, at_NJ, (scaled_NJ * is_here_NJ).to(grad_NV.dtype))
            if slope_NV is not None:
                grad_NV *= slope_NV
            grad_NV = grad_NV.to(hidden_ND.dtype)
            if grad_bias_V is not None:
                grad_bias_V += grad_NV.sum(0)
            grad_hidden_ND[rows] = grad_NV @ weight_VD
            # The product of a chunk is as large as the weight. No variable refers to it, so it is freed before the
            # result is converted.
            if grad_weight_VD is None:
                grad_weight_VD = _wide(grad_NV.T @ hidden_ND[rows])
            else:
                grad_weight_VD += grad_NV.T @ hidden_ND[rows]
        if shard is not None:
            shard.reduce(grad_hidden_ND)
        if grad_weight_VD is None:
            grad_weight_VD = torch.zeros_like(weight_VD)
        return grad_hidden_ND, grad_weight_VD.to(weight_VD.dtype), grad_bias_V, None, None, None, None, None


def _chunks(size: int, chunk: int) -> Iterator[slice]:
    return (slice(start, start + chunk) for start in range(0, size, chunk))


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def capped(logits_NV: torch.Tensor, softcap: float) -> torch.Tensor:
    """Limit logits smoothly to a range of -softcap to softcap (arXiv:2408.00118, section 2).  # [N, V]"""
    return (logits_NV / softcap).tanh() * softcap


def _distribution(
    hidden_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    bias_V: torch.Tensor | None,
    temperatures_N: torch.Tensor,
    softcap: float | None,
    shard: VocabularyShard | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Logits minus the maximum over the whole vocabulary, their probabilities, the log-normalizers to subtract from
    these logits to obtain logprobs, and the slope of the cap on the logits, if there is one.  # [N, V], [N, V], [N],
    [N, V]"""
    logits_NV, slope_NV = _wide(F.linear(hidden_ND, weight_VD, bias_V)), None
    if softcap is not None:
        logits_NV = capped(logits_NV, softcap)
        slope_NV = 1 - (logits_NV / softcap).square()
    scaled_NV = logits_NV.div_(temperatures_N[:, None])
    greatest_N1 = scaled_NV.amax(-1, keepdim=True)
    if shard is not None:
        shard.reduce(greatest_N1, dist.ReduceOp.MAX)
    shifted_NV = scaled_NV.sub_(greatest_N1)
    probs_NV = shifted_NV.exp()
    sums_N1 = probs_NV.sum(-1, keepdim=True)
    if shard is not None:
        shard.reduce(sums_N1)
    probs_NV /= sums_N1
    return shifted_NV, probs_NV, sums_N1.squeeze(-1).log(), slope_NV


def _local_positions(
    targets_NJ: torch.Tensor, weight_VD: torch.Tensor, shard: VocabularyShard | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions of the targets' logits on this rank, and whether this rank has them.  # int64 [N, J], bool [N, J]"""
    at_NJ = targets_NJ - (shard.start if shard else 0)
    is_here_NJ = (at_NJ >= 0) & (at_NJ < len(weight_VD))
    return at_NJ.where(is_here_NJ, 0), is_here_NJ

"""Attention variants of some model families: sliding windows, softcapped scores and sinks. This file needs only
torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Variant:
    """Differences from plain causal attention.

    Attributes:
        window: Maximum number of tokens that a token attends to, including itself; None for no limit.
        softcap: Bound of the scores: x becomes softcap * tanh(x / softcap) (arXiv:2408.00118, section 2).
        sinks_N: Score of a token without a value, which takes a part of the attention, for each of the N heads
            (arXiv:2309.17453, section 3).
    """

    window: int | None = None
    softcap: float | None = None
    sinks_N: torch.Tensor | None = None

    @property
    def needs_scores(self) -> bool:
        """Whether torch's kernels cannot compute this variant, so that the scores of all pairs of tokens must be in
        memory."""
        return self.softcap is not None or self.sinks_N is not None


PLAIN = Variant()


def attend_by_scores(
    q_DQNH: torch.Tensor,
    k_DKMH: torch.Tensor,
    v_DKMH: torch.Tensor,
    mask: torch.Tensor,
    scale: float | None,
    variant: Variant,
) -> torch.Tensor:
    """Compute attention from the scores of all pairs of tokens, in at least float32.

    Args:
        mask: Values added to the scores; they also exclude tokens outside the variant's window.  # [D or 1, 1, Q, K]
        scale: Factor of the scores. By default, the inverse square root of the head size.

    Returns:
        Results of the attention.  # [D, Q, N, H]
    """
    groups = q_DQNH.shape[2] // k_DKMH.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q_DQNH, k_DKMH, v_DKMH))
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    with torch.autocast(q.device.type, enabled=False):
        scores = q @ k.transpose(-2, -1) * (q.shape[-1] ** -0.5 if scale is None else scale)
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        if variant.softcap is not None:
            scores = (scores / variant.softcap).tanh() * variant.softcap
        scores = scores + mask
        if variant.sinks_N is None:
            probs = scores.softmax(-1)
        else:
            sinks = variant.sinks_N.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
            probs = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
        return (probs.to(v.dtype) @ v).transpose(1, 2)

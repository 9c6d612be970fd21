"""Attention of context-parallel ranks, computed in one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from titan_rl.training.attention.attention import ContextRanks
from titan_rl.training.attention.documents import Document


@dataclass(frozen=True)
class OneOf(ContextRanks):
    """One rank whose gather results are set beforehand."""

    group: Any = None
    gathered: list[torch.Tensor] = field(default_factory=list[torch.Tensor])

    def gather(self, own_PNH: torch.Tensor) -> torch.Tensor:
        found = self.gathered.pop(0)
        here = slice(self.rank * len(own_PNH), (self.rank + 1) * len(own_PNH))
        assert torch.equal(found[here], own_PNH)
        return found


def attended_by_all(
    lay_out: Callable[..., Any], documents: list[Document], size: int, qkv: list[torch.Tensor], **how: Any
) -> torch.Tensor:
    """Outputs of all ranks, joined in token order.

    Args:
        qkv: [1, T, N, H] each.
    """
    q, k, v = qkv
    found = torch.zeros_like(q)
    for rank in range(size):
        ranks = OneOf(rank, size)
        layout = lay_out(documents, q.device, ranks)
        of_all = layout.share.order_T.where(layout.share.order_T < q.shape[1], 0)
        ranks.gathered.extend(x[0, of_all] for x in (k, v))
        out = layout.attend(*map(layout.share.take, qkv), **how)
        mine, at = layout.share.find(torch.arange(q.shape[1], device=q.device))
        found = found.index_copy(1, mine, out[:, at])
    return found

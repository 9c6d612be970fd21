"""Attention inside documents as one kernel over all rows of a batch: torch's flex attention.

The kernel skips every block of queries and keys in which no token may attend to another, so rows cost what their
documents do. Which blocks those are follows from the documents alone. Only on CPUs, where it is there for tests, is a
mask of all pairs of tokens made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, create_mask, flex_attention

from titan_rl.training.attention.attention import Document

BLOCK = 128
"""Tokens on each side of a block."""


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Which tokens of a batch attend to which, all rows laid end to end."""

    block_mask: BlockMask  # [1, 1, num_tokens, num_tokens]

    def attend(
        self,
        q_BLNH: torch.Tensor,
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """Attend within documents.  # [B, L, N, H]"""
        device = q_BLNH.device.type
        q, k, v = (x.flatten(0, 1).transpose(0, 1)[None] for x in (q_BLNH, k_BLNH, v_BLNH))  # [1, N, B * L, H]
        if torch.is_autocast_enabled(device):
            q, k, v = (x.to(torch.get_autocast_dtype(device)) for x in (q, k, v))
        if device == "cpu":  # where torch has no backward pass of flex attention
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=self._mask(), scale=scale, enable_gqa=enable_gqa)
        else:
            out = _compiled()(q, k, v, block_mask=self.block_mask, scale=scale, enable_gqa=enable_gqa)
        return out[0].transpose(0, 1).view(q_BLNH.shape)

    def _mask(self) -> torch.Tensor:
        """Of all pairs of tokens.  # bool [1, 1, num_tokens, num_tokens]"""
        mask = self.block_mask
        return create_mask(mask.mask_mod, 1, 1, *mask.seq_lengths, device=mask.kv_num_blocks.device)


def layout_blocks(documents: Sequence[Document], device: torch.device | str = "cpu") -> BlockLayout:
    """Find the blocks in which tokens attend to each other.

    Args:
        documents: in token order; together they cover every token of the batch, padding included.
    """
    num_tokens = sum(document.length for document in documents)
    num_blocks = -(-num_tokens // BLOCK)
    some = torch.zeros(num_blocks, num_blocks, dtype=torch.bool)  # [queries, keys]: a token there attends to another
    every = torch.zeros_like(some)  # every token there attends to every other
    start = 0
    for document in documents:
        own = slice(start, start + document.length)
        prefix = slice(document.prefix_start, document.prefix_start + document.prefix_length)
        queries = _touched(own)
        some[queries, queries] |= _lower(queries)
        some[queries, _touched(prefix)] = True
        queries = _covered(own)
        every[queries, queries] = _lower(queries, diagonal=-1)
        every[queries, _covered(prefix)] = True
        start = own.stop

    def per_token(values: list[int]) -> torch.Tensor:
        return torch.repeat_interleave(torch.tensor(values), lengths).to(device, torch.int32)

    lengths = torch.tensor([document.length for document in documents])
    document_T = per_token(list(range(len(documents))))
    prefix_start_T = per_token([document.prefix_start for document in documents])
    prefix_end_T = per_token([document.prefix_start + document.prefix_length for document in documents])

    def attends(_batch: Any, _head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        own = (document_T[query] == document_T[key]) & (key <= query)
        return own | ((key >= prefix_start_T[query]) & (key < prefix_end_T[query]))

    partial = _listed(some & ~every)
    full = _listed(every)
    block_mask = BlockMask.from_kv_blocks(
        *partial, *full, BLOCK_SIZE=BLOCK, mask_mod=attends, seq_lengths=(num_tokens, num_tokens)
    )
    return BlockLayout(block_mask.to(device))


@cache
def _compiled() -> Any:
    """Without it every score would be kept in memory."""
    return torch.compile(flex_attention)


def _touched(tokens: slice) -> slice:
    """The blocks that have one of the tokens."""
    first = tokens.start // BLOCK
    return slice(first, -(-tokens.stop // BLOCK) if tokens.stop > tokens.start else first)


def _covered(tokens: slice) -> slice:
    """The blocks that have no other tokens."""
    first = -(-tokens.start // BLOCK)
    return slice(first, max(first, tokens.stop // BLOCK))


def _lower(blocks: slice, diagonal: int = 0) -> torch.Tensor:
    num_blocks = blocks.stop - blocks.start
    return torch.ones(num_blocks, num_blocks, dtype=torch.bool).tril(diagonal)


def _listed(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """How many key blocks each block of queries has, and which, those first.  # int32 [1, 1, Q], [1, 1, Q, K]"""
    counts = blocks.sum(-1, dtype=torch.int32)
    indices = blocks.int().argsort(dim=-1, descending=True, stable=True).int()
    return counts[None, None], indices[None, None].contiguous()

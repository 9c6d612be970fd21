"""Attention inside documents as one kernel over all rows of a batch: torch's flex attention.

The kernel skips every block of queries and keys in which no token may attend to another, so a row costs as much as its
documents, which determine the blocks. On CPUs, which only tests use, a mask of all pairs of tokens is built instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, FlexKernelOptions, create_mask, flex_attention

from titan_rl.core.errors import ConfigError
from titan_rl.training.attention.attention import ContextRanks, TokenShare, share_tokens
from titan_rl.training.attention.documents import Document, DocumentSequences
from titan_rl.training.attention.variants import PLAIN, Variant

BLOCK = 128
"""Side of a block, in tokens."""

KERNEL: FlexKernelOptions = {"BACKEND": "TRITON"}
"""The kernel for sequences of any length. For fewer than `BLOCK` queries torch would otherwise select its decoding
kernel, which does not compile for a varying number of queries."""

NO_VARIANTS = (
    'training.attention = "flex" has no sliding windows, caps on scores or sinks, which this model needs; set it to '
    '"auto" or "document"'
)

MAX_KERNELS = 64
"""Maximum number of kernels to compile. Each combination of dtype, number of heads, scale and use of gradients needs
its own, and torch stops compiling after 8 by default."""


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Block mask of the tokens of a batch, all rows laid end to end. If ranks share the batch, the queries are this
    rank's tokens and the keys those of all ranks."""

    block_mask: BlockMask  # [1, 1, num_queries, num_keys]
    sequences: DocumentSequences
    share: TokenShare | None = None

    def attend(
        self,
        q_BLNH: torch.Tensor,
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        *,
        scale: float | None = None,
        variant: Variant = PLAIN,
    ) -> torch.Tensor:
        """Attend within documents.  # [B, L, N, H]

        Raises:
            ConfigError: The variant is not plain attention.
        """
        if variant is not PLAIN:
            raise ConfigError(NO_VARIANTS)
        device = q_BLNH.device.type
        tokens = [x.flatten(0, 1) for x in (q_BLNH, k_BLNH, v_BLNH)]
        if self.share is not None:
            tokens[1:] = map(self.share.ranks.gather, tokens[1:])
        q, k, v = (x.transpose(0, 1)[None] for x in tokens)  # [1, N, num_queries or num_keys, H]
        if torch.is_autocast_enabled(device):
            q, k, v = (x.to(torch.get_autocast_dtype(device)) for x in (q, k, v))
        enable_gqa = q.shape[1] != k.shape[1]
        if device == "cpu":  # torch's flex attention has no backward pass there
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=self._mask(), scale=scale, enable_gqa=enable_gqa)
        else:
            # In a block that is being compiled, the kernel becomes part of the block.
            kernel = flex_attention if torch.compiler.is_compiling() else _compiled()
            out = kernel(q, k, v, block_mask=self.block_mask, scale=scale, enable_gqa=enable_gqa, kernel_options=KERNEL)
        return out[0].transpose(0, 1).view(*q_BLNH.shape[:-1], v_BLNH.shape[-1])

    def _mask(self) -> torch.Tensor:
        """Mask of all pairs of tokens.  # bool [1, 1, num_queries, num_keys]"""
        mask = self.block_mask
        return create_mask(mask.mask_mod, 1, 1, *mask.seq_lengths, device=mask.kv_num_blocks.device)


def layout_blocks(
    documents: Sequence[Document], device: torch.device | str = "cpu", ranks: ContextRanks | None = None
) -> BlockLayout:
    """Find the blocks in which tokens attend to each other.

    Args:
        documents: Documents in token order. Together they cover every token of the batch, padding included.
        ranks: Ranks that share the tokens; None if this rank has all of them.
    """
    num_tokens = sum(document.length for document in documents)
    share, sequences = None, DocumentSequences(documents, device)
    queries_Q = keys_K = torch.arange(num_tokens)
    if ranks is not None:
        share = share_tokens(num_tokens, ranks, multiple_of=BLOCK, device=device)
        documents = [*documents, Document(share.num_tokens - num_tokens)]
        keys_K = share.order_T.cpu()
        queries_Q = keys_K[share.here]
    some, every = _blocks(documents)
    if share is not None:
        rows, columns = queries_Q[::BLOCK] // BLOCK, keys_K[::BLOCK] // BLOCK
        some, every = (blocks[rows][:, columns] for blocks in (some, every))
    block_mask = BlockMask.from_kv_blocks(
        *_listed(some & ~every),
        *_listed(every),
        BLOCK_SIZE=BLOCK,
        mask_mod=_attends(documents, queries_Q, keys_K, device),
        seq_lengths=(len(queries_Q), len(keys_K)),
    )
    return BlockLayout(block_mask.to(device), sequences, share)


def _blocks(documents: Sequence[Document]) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks in which some token attends to another, and blocks in which every token attends to every other.
    # bool [num_blocks of queries, num_blocks of keys] each"""
    num_blocks = -(-sum(document.length for document in documents) // BLOCK)
    some = torch.zeros(num_blocks, num_blocks, dtype=torch.bool)
    every = torch.zeros_like(some)
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
    return some, every


def _attends(
    documents: Sequence[Document], queries_Q: torch.Tensor, keys_K: torch.Tensor, device: torch.device | str
) -> Callable[[Any, Any, torch.Tensor, torch.Tensor], torch.Tensor]:
    """Build the function that decides whether a query attends to a key, by their positions.

    Args:
        queries_Q: Token index of each query.
        keys_K: Token index of each key.
    """
    lengths = torch.tensor([document.length for document in documents])

    def per_token(values: list[int]) -> torch.Tensor:
        return torch.repeat_interleave(torch.tensor(values), lengths)

    def to_device(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device, torch.int32)

    document_T = per_token(list(range(len(documents))))
    prefix_start_T = per_token([document.prefix_start for document in documents])
    prefix_end_T = per_token([document.prefix_start + document.prefix_length for document in documents])
    of_query = [to_device(each[queries_Q]) for each in (document_T, prefix_start_T, prefix_end_T)]
    document_Q, prefix_start_Q, prefix_end_Q = of_query
    document_K, query_token_Q, key_token_K = to_device(document_T[keys_K]), to_device(queries_Q), to_device(keys_K)

    def attends(_batch: Any, _head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        token = key_token_K[key]
        own = (document_Q[query] == document_K[key]) & (token <= query_token_Q[query])
        return own | ((token >= prefix_start_Q[query]) & (token < prefix_end_Q[query]))

    return attends


@cache
def _compiled() -> Any:
    """Compiled kernel. Uncompiled, flex attention keeps every score in memory, so `fullgraph` makes a failure to
    compile an error."""
    limit = torch._dynamo.config.recompile_limit
    torch._dynamo.config.recompile_limit = max(limit, MAX_KERNELS)
    return torch.compile(flex_attention, fullgraph=True)


def _touched(tokens: slice) -> slice:
    """Blocks that contain one of the tokens."""
    first = tokens.start // BLOCK
    return slice(first, -(-tokens.stop // BLOCK) if tokens.stop > tokens.start else first)


def _covered(tokens: slice) -> slice:
    """Blocks that contain no other tokens."""
    first = -(-tokens.start // BLOCK)
    return slice(first, max(first, tokens.stop // BLOCK))


def _lower(blocks: slice, diagonal: int = 0) -> torch.Tensor:
    num_blocks = blocks.stop - blocks.start
    return torch.ones(num_blocks, num_blocks, dtype=torch.bool).tril(diagonal)


def _listed(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Number of key blocks that each block of queries attends to, and the indices of all key blocks, with those first.
    # int32 [1, 1, Q], [1, 1, Q, K]"""
    counts = blocks.sum(-1, dtype=torch.int32)
    indices = blocks.int().argsort(dim=-1, descending=True, stable=True).int()
    return counts[None, None], indices[None, None].contiguous()

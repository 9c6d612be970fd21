"""Causal attention inside each document of packed rows, on any device that has torch's SDPA.

A row holds several documents, and a dense mask over a row costs its length squared. Here documents of similar length
are gathered into one padded batch, where plain causal attention needs no mask: a padded key lies after every real
query of its document, so no real query sees it. The cost is the sum of the squared document lengths. A document that
continues a prefix, which others may continue too, also attends to the prefix's keys, under a mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

MIN_FILL = 0.75
"""A bucket takes documents at least this long relative to its longest one."""


@dataclass(frozen=True, slots=True)
class Document:
    """Consecutive tokens that attend to each other, and to a prefix of other tokens before them if there is one."""

    length: int
    prefix_start: int = 0
    prefix_length: int = 0


class Layout(Protocol):
    """Where the documents of a batch lie, and how their tokens attend to each other."""

    def attend(
        self,
        q_BLNH: torch.Tensor,
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class Bucket:
    """Documents of similar length, padded to one width."""

    num_documents: int
    width: int
    prefix_tokens: torch.Tensor | None = None  # [num_documents * prefix_width], padded with token 0
    mask: torch.Tensor | None = None  # bool [num_documents, 1, width, prefix_width + width]; without it causal

    @property
    def num_slots(self) -> int:
        return self.num_documents * self.width


@dataclass(frozen=True, slots=True)
class DocumentLayout:
    """Where every token of a batch goes when its documents are gathered into buckets.

    `slots` are the positions of all buckets, laid end to end.

    Example: one row of five tokens, documents of lengths 3 and 2, in two buckets:

        DocumentLayout(buckets=(Bucket(1, 3), Bucket(1, 2)), token_of_slot=[0, 1, 2, 3, 4],
                       slot_of_token=[0, 1, 2, 3, 4], padded_slots=[])
    """

    buckets: tuple[Bucket, ...]
    token_of_slot: torch.Tensor  # [num_slots]
    slot_of_token: torch.Tensor  # [num_tokens]
    padded_slots: torch.Tensor  # [num_padded_slots]; they repeat token 0

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
        sizes = [bucket.num_slots for bucket in self.buckets]
        tokens = [x.flatten(0, 1) for x in (q_BLNH, k_BLNH, v_BLNH)]
        slots = (_Gather.apply(x, self).split(sizes) for x in tokens)
        outputs: list[torch.Tensor] = []
        for bucket, *qkv in zip(self.buckets, *slots, strict=True):
            q, k, v = (x.view(bucket.num_documents, bucket.width, *x.shape[1:]) for x in qkv)
            if bucket.prefix_tokens is not None:
                k, v = (
                    torch.cat(
                        [x.index_select(0, bucket.prefix_tokens).view(bucket.num_documents, -1, *x.shape[1:]), own], 1
                    )
                    for x, own in zip(tokens[1:], (k, v), strict=True)
                )
            out = F.scaled_dot_product_attention(
                *(x.transpose(1, 2) for x in (q, k, v)),
                attn_mask=bucket.mask,
                is_causal=bucket.mask is None,
                scale=scale,
                enable_gqa=enable_gqa,
            )
            outputs.append(out.transpose(1, 2).flatten(0, 1))
        return _Ungather.apply(torch.cat(outputs), self).view(q_BLNH.shape)


def layout_documents(documents: Sequence[Document], device: torch.device | str = "cpu") -> DocumentLayout:
    """Sort documents into buckets, those with a prefix apart from those without.

    Args:
        documents: in token order; together they cover every token of the batch, padding included.
    """
    members: list[list[int]] = []
    for index in sorted(range(len(documents)), key=lambda i: (documents[i].prefix_length > 0, -documents[i].length)):
        first = documents[members[-1][0]] if members else None
        alike = first is not None and (first.prefix_length > 0) == (documents[index].prefix_length > 0)
        if first is not None and alike and documents[index].length >= MIN_FILL * first.length:
            members[-1].append(index)
        else:
            members.append([index])
    lengths_D = np.array([document.length for document in documents], np.int64)
    starts_D = lengths_D.cumsum() - lengths_D
    of_buckets = [_padded(starts_D[bucket], lengths_D[bucket], lengths_D[bucket[0]]) for bucket in members]
    token_of_slot = np.concatenate([tokens_DW.ravel() for tokens_DW in of_buckets])
    is_padded = token_of_slot < 0
    slot_of_token = np.empty(lengths_D.sum(), np.int64)
    slot_of_token[token_of_slot[~is_padded]] = np.flatnonzero(~is_padded)
    token_of_slot[is_padded] = 0
    buckets = tuple(_bucket([documents[index] for index in bucket], device) for bucket in members)
    indices = (token_of_slot, slot_of_token, np.flatnonzero(is_padded))
    return DocumentLayout(buckets, *(torch.from_numpy(each).to(device) for each in indices))


def _padded(starts_D: NDArray[Any], lengths_D: NDArray[Any], width: int) -> NDArray[Any]:
    """Ranges of so many consecutive numbers, one a row, and -1 behind them.  # [D, width]"""
    place_W = np.arange(width)
    return np.where(place_W < lengths_D[:, None], starts_D[:, None] + place_W, -1)


def _bucket(documents: Sequence[Document], device: torch.device | str) -> Bucket:
    count, width = len(documents), documents[0].length
    prefix_width = max(document.prefix_length for document in documents)
    if not prefix_width:
        return Bucket(count, width)
    starts_D = np.array([document.prefix_start for document in documents], np.int64)
    lengths_D = np.array([document.prefix_length for document in documents], np.int64)
    tokens_DP = torch.from_numpy(_padded(starts_D, lengths_D, prefix_width)).to(device)
    in_prefix = tokens_DP >= 0
    causal = torch.ones(width, width, dtype=torch.bool, device=device).tril()
    mask = torch.cat([in_prefix[:, None, None].expand(-1, -1, width, -1), causal.expand(count, 1, -1, -1)], dim=-1)
    return Bucket(count, width, tokens_DP.clamp(min=0).flatten(), mask)


class _Gather(torch.autograd.Function):
    """Tokens to slots. Each token has one slot that counts, so the gradient is a gather too, not a scatter-add."""

    @staticmethod
    def forward(ctx: Any, x_TNH: torch.Tensor, layout: DocumentLayout) -> torch.Tensor:
        ctx.layout = layout
        return x_TNH.index_select(0, layout.token_of_slot)

    @staticmethod
    def backward(ctx: Any, grad_SNH: torch.Tensor) -> tuple[torch.Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad_SNH.index_select(0, ctx.layout.slot_of_token), None


class _Ungather(torch.autograd.Function):
    """Slots back to tokens. Padded slots are read by no one and receive no gradient."""

    @staticmethod
    def forward(ctx: Any, x_SNH: torch.Tensor, layout: DocumentLayout) -> torch.Tensor:
        ctx.layout = layout
        return x_SNH.index_select(0, layout.slot_of_token)

    @staticmethod
    def backward(ctx: Any, grad_TNH: torch.Tensor) -> tuple[torch.Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        grad = grad_TNH.index_select(0, ctx.layout.token_of_slot)
        return grad.index_fill_(0, ctx.layout.padded_slots, 0), None

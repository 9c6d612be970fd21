"""Causal attention inside each document of packed rows, on any device that has torch's SDPA.

A row holds several documents, and a dense mask over a row costs its length squared. Here documents of similar length
are gathered into one padded batch, where plain causal attention needs no mask: a padded key lies after every real
query of its document, so no real query sees it. The cost is the sum of the squared document lengths. A document that
continues a prefix, which others may continue too, also attends to the prefix's keys, under a mask. So does this rank's
part of a document whose beginning another rank computes (`context.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch.nn.attention import SDPBackend, sdpa_kernel

from titan_rl.training.attention.context import ContextRanks, TokenShare, share_tokens

FLASH_HEAD_DIM = 256
"""Most entries of a head that the flash kernel takes."""

MIN_FILL = 0.75
"""A bucket takes documents at least this long relative to its longest one."""


@dataclass(frozen=True, slots=True)
class Document:
    """Consecutive tokens that attend to each other, and to a prefix of other tokens before them if there is one."""

    length: int
    prefix_start: int = 0
    prefix_length: int = 0


class Layout(Protocol):
    """Positions of the documents of a batch, and attention between their tokens."""

    @property
    def share(self) -> TokenShare | None:
        """The tokens that this rank computes; None if it computes all."""
        ...

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
    mask: Mask | None = None  # [num_documents, 1, width, prefix_width + width]; without it causal

    @property
    def num_slots(self) -> int:
        return self.num_documents * self.width


@dataclass(frozen=True, slots=True)
class Kernel:
    """The implementations of torch's scaled dot product attention that a call is left to."""

    backends: tuple[SDPBackend, ...] = ()  # any, if there are none
    takes_groups: bool = True  # several heads of queries share one of keys and values


def choose_kernel(device_type: str, dtype: torch.dtype, head_dim: int, *, masked: bool) -> Kernel:
    """A kernel that keeps no scores for the backward pass, where there is one for such heads.

    Left to itself, torch falls back to its math kernel on CUDA where both a mask, or float32, and grouped heads are
    asked for. That keeps 12 bytes of each score, head and layer: tens of gigabytes for a model of 0.6B parameters.
    """
    if device_type != "cuda" or head_dim * dtype.itemsize % 16:
        return Kernel()
    if masked or dtype not in (torch.bfloat16, torch.float16) or head_dim > FLASH_HEAD_DIM:
        return Kernel((SDPBackend.EFFICIENT_ATTENTION,), takes_groups=False)
    return Kernel((SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION))


class Mask:
    """Attention mask that is added to scores. All layers share one tensor, which they keep for the backward pass."""

    def __init__(self, allowed: torch.Tensor) -> None:
        self._allowed = allowed
        self._added: torch.Tensor | None = None

    def added(self, dtype: torch.dtype) -> torch.Tensor:
        """0 where attention is allowed, and minus infinity elsewhere."""
        if self._added is None or self._added.dtype != dtype:
            nothing = torch.zeros((), dtype=dtype, device=self._allowed.device)
            self._added = nothing.where(self._allowed, -torch.inf)
        return self._added


@dataclass(frozen=True, slots=True)
class DocumentLayout:
    """Slot of every token of a batch when its documents are gathered into buckets.

    `slots` are the positions of all buckets, laid end to end. Where ranks share the batch, tokens are those of this
    rank, and prefixes those of all ranks.

    Example: one row of five tokens, documents of lengths 3 and 2, in two buckets:

        DocumentLayout(buckets=(Bucket(1, 3), Bucket(1, 2)), token_of_slot=[0, 1, 2, 3, 4],
                       slot_of_token=[0, 1, 2, 3, 4], padded_slots=[])
    """

    buckets: tuple[Bucket, ...]
    token_of_slot: torch.Tensor  # [num_slots]
    slot_of_token: torch.Tensor  # [num_tokens]
    padded_slots: torch.Tensor  # [num_padded_slots]; they repeat token 0
    share: TokenShare | None = None

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
        q, *kv = (x.flatten(0, 1) for x in (q_BLNH, k_BLNH, v_BLNH))
        of_all = kv
        if self.share is not None:
            of_all = [self.share.ranks.gather(x) for x in kv]
            kv = [x[self.share.here] for x in of_all]
        sizes = [bucket.num_slots for bucket in self.buckets]
        slots = (_Gather.apply(x, self).split(sizes) for x in (q, *kv))
        outputs: list[torch.Tensor] = []
        for bucket, *qkv in zip(self.buckets, *slots, strict=True):
            q, k, v = (x.view(bucket.num_documents, bucket.width, *x.shape[1:]) for x in qkv)
            if bucket.prefix_tokens is not None:
                k, v = (
                    torch.cat(
                        [x.index_select(0, bucket.prefix_tokens).view(bucket.num_documents, -1, *x.shape[1:]), own], 1
                    )
                    for x, own in zip(of_all, (k, v), strict=True)
                )
            if torch.is_autocast_enabled(q.device.type):  # the mask is then made once in that dtype, not once a layer
                q, k, v = (x.to(torch.get_autocast_dtype(q.device.type)) for x in (q, k, v))
            kernel = choose_kernel(q.device.type, q.dtype, q.shape[-1], masked=bucket.mask is not None)
            if enable_gqa and not kernel.takes_groups:
                k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
            with sdpa_kernel(list(kernel.backends)) if kernel.backends else nullcontext():
                out = F.scaled_dot_product_attention(
                    *(x.transpose(1, 2) for x in (q, k, v)),
                    attn_mask=bucket.mask.added(q.dtype) if bucket.mask else None,
                    is_causal=bucket.mask is None,
                    scale=scale,
                    enable_gqa=enable_gqa and kernel.takes_groups,
                )
            outputs.append(out.transpose(1, 2).flatten(0, 1))
        return _Ungather.apply(torch.cat(outputs), self).view(q_BLNH.shape)


def layout_documents(
    documents: Sequence[Document], device: torch.device | str = "cpu", ranks: ContextRanks | None = None
) -> DocumentLayout:
    """Sort documents into buckets, those with a prefix apart from those without.

    Args:
        documents: in token order; together they cover every token of the batch, padding included.
        ranks: that share the tokens; None where this one has all.
    """
    num_tokens = sum(document.length for document in documents)
    share = share_tokens(num_tokens, ranks, device=device) if ranks is not None else None
    if share is None:
        pieces = _pieces(documents, [range(num_tokens)])
    else:
        pieces = _pieces([*documents, Document(share.num_tokens - num_tokens)], share.chunks)
    members: list[list[_Piece]] = []
    for piece in sorted(pieces, key=lambda piece: (piece.has_prefix, -piece.length)):
        if members and members[-1][0].is_like(piece):
            members[-1].append(piece)
        else:
            members.append([piece])
    of_buckets = [_padded([range(piece.start, piece.start + piece.length) for piece in bucket]) for bucket in members]
    token_of_slot = np.concatenate([tokens_DW.ravel() for tokens_DW in of_buckets])
    is_padded = token_of_slot < 0
    slot_of_token = np.empty(sum(piece.length for piece in pieces), np.int64)
    slot_of_token[token_of_slot[~is_padded]] = np.flatnonzero(~is_padded)
    token_of_slot[is_padded] = 0
    buckets = tuple(_bucket(bucket, share, device) for bucket in members)
    indices = (token_of_slot, slot_of_token, np.flatnonzero(is_padded))
    return DocumentLayout(buckets, *(torch.from_numpy(each).to(device) for each in indices), share=share)


def _padded(rows: Sequence[range]) -> NDArray[Any]:
    """Ranges of numbers, one a row, and -1 behind those that are shorter than the longest.  # [rows, width]"""
    starts_R = np.array([row.start for row in rows], np.int64)
    lengths_R = np.array([len(row) for row in rows], np.int64)
    place_W = np.arange(lengths_R.max())
    return np.where(place_W < lengths_R[:, None], starts_R[:, None] + place_W, -1)


@dataclass(frozen=True, slots=True)
class _Piece:
    """A document, or the part of it that lies in one chunk."""

    start: int  # among this rank's tokens
    length: int
    prefix: range  # tokens of the batch that all of it attends to
    cut: range  # and those of its document that lie before it

    @property
    def has_prefix(self) -> bool:
        return bool(self.prefix or self.cut)

    def is_like(self, other: _Piece) -> bool:
        """Whether a shorter one belongs into the bucket that this one began."""
        if self.cut or other.cut or self.has_prefix != other.has_prefix:
            return False
        return other.length >= MIN_FILL * self.length


def _pieces(documents: Sequence[Document], chunks: Sequence[range]) -> list[_Piece]:
    pieces: list[_Piece] = []
    own = 0
    for chunk in chunks:
        start = 0
        for document in documents:
            end = start + document.length
            first, last = max(start, chunk.start), min(end, chunk.stop)
            if first < last:
                prefix = range(document.prefix_start, document.prefix_start + document.prefix_length)
                pieces.append(_Piece(own, last - first, prefix, range(start, first)))
                own += last - first
            start = end
    return pieces


def _bucket(pieces: Sequence[_Piece], share: TokenShare | None, device: torch.device | str) -> Bucket:
    count, width = len(pieces), pieces[0].length
    if not pieces[0].has_prefix:
        return Bucket(count, width)
    prefixes_DP = _padded([piece.prefix for piece in pieces])
    if pieces[0].cut:
        prefixes_DP = np.concatenate([prefixes_DP, _padded([pieces[0].cut])], axis=1)
    tokens_DP = torch.from_numpy(prefixes_DP).to(device)
    in_prefix = tokens_DP >= 0
    causal = torch.ones(width, width, dtype=torch.bool, device=device).tril()
    mask = torch.cat([in_prefix[:, None, None].expand(-1, -1, width, -1), causal.expand(count, 1, -1, -1)], dim=-1)
    tokens = tokens_DP.clamp(min=0).flatten()
    return Bucket(count, width, tokens if share is None else share.place_T[tokens], Mask(mask))


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

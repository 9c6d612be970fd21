"""Causal attention inside each document of packed rows, on any device that has torch's SDPA, and context parallelism.

A row holds several documents, and a dense mask over a row costs its length squared. Here documents of similar length
are gathered into one padded batch, where plain causal attention needs no mask: a padded key lies after every real
query of its document, so no real query sees it. The cost is the sum of the squared document lengths. A document that
continues a prefix, which several may share, also attends to the prefix's keys, under a mask. So does this rank's
part of a document that begins on another rank.

Context parallelism shares the tokens of rows that are too long for one rank. The rows of a batch, laid end to end, are
cut into twice as many chunks as there are ranks, and each rank computes one chunk and its mirror image: later tokens
attend to more, so this balances the ranks' work. Ranks gather the keys and values of all tokens in each layer;
everything else of a token stays on its rank.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy.typing import NDArray
from torch.nn.attention import SDPBackend, sdpa_kernel

from titan_rl.training.attention.documents import MIN_FILL, Document, DocumentSequences
from titan_rl.training.attention.variants import PLAIN, Variant, attend_by_scores

# Earlier versions of torch have only the deprecated names.
_gather_into: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_into: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True, slots=True)
class ContextRanks:
    """The ranks that share the tokens of a row, and this rank's number among them."""

    rank: int
    size: int
    group: Any

    def gather(self, own_PNH: torch.Tensor) -> torch.Tensor:
        """Concatenate the tensors of all ranks. The gradient is summed over the ranks, so all of them must use the
        result: otherwise the others would wait in the backward pass.  # [size * P, N, H]"""
        return _GatherTokens.apply(own_PNH, self)

    def spread(self, own_M: torch.Tensor, at_M: torch.Tensor, size: int) -> torch.Tensor:
        """Join a tensor whose entries are distributed over the ranks. All ranks must use the result in the same way.
        Each rank receives the gradient of its own entries.

        Args:
            own_M: This rank's entries; they may have further dimensions.
            at_M: Indices of the entries in the result.  # int64 [M]
            size: Length of the result.
        """
        return _SpreadEntries.apply(own_M, at_M, size, self)


@dataclass(frozen=True, slots=True)
class TokenShare:
    """The tokens of a batch that one of the ranks computes. The batch may be followed by padding, which repeats token
    0, so that all ranks have the same number of tokens.

    Example: of 8 tokens rank 0 of 2 computes 0, 1, 6 and 7, and rank 1 the others:

        TokenShare(ranks, chunks=(range(0, 2), range(6, 8)), tokens_P=[0, 1, 6, 7], order_T=[0, 1, 6, 7, 2, 3, 4, 5],
                   gathered_position_T=[0, 1, 4, 5, 6, 7, 2, 3])
    """

    ranks: ContextRanks
    chunks: tuple[range, range]  # tokens of this rank's two chunks, including padding
    tokens_P: torch.Tensor  # this rank's tokens; padding repeats token 0
    order_T: torch.Tensor  # tokens of all ranks in gathered order, including padding
    gathered_position_T: torch.Tensor  # position of each token in gathered order

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all ranks, including padding."""
        return len(self.order_T)

    @property
    def here(self) -> slice:
        """This rank's tokens among those gathered."""
        size = len(self.tokens_P)
        return slice(self.ranks.rank * size, (self.ranks.rank + 1) * size)

    def take(self, x_BL: torch.Tensor) -> torch.Tensor:
        """This rank's tokens of all rows, as one row.  # [1, P], and further dimensions of a token"""
        return x_BL.flatten(0, 1).index_select(0, self.tokens_P)[None]

    def find(self, tokens_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Indices of the tokens that this rank computes, and their positions among its own.  # int64 [M], [M]"""
        position_N = self.gathered_position_T[tokens_N]
        own_M = ((position_N >= self.here.start) & (position_N < self.here.stop)).nonzero().squeeze(-1)
        return own_M, position_N[own_M] - self.here.start


def share_tokens(
    num_tokens: int, ranks: ContextRanks, *, multiple_of: int = 1, device: torch.device | str = "cpu"
) -> TokenShare:
    """Share the tokens of a batch among ranks.

    Args:
        multiple_of: The length of each chunk is a multiple of this number.
    """
    size = -(-num_tokens // (2 * ranks.size * multiple_of)) * multiple_of
    last = 2 * ranks.size - 1
    numbers = [number for rank in range(ranks.size) for number in (rank, last - rank)]
    chunks_CT = torch.arange((last + 1) * size).view(-1, size)
    order_T = chunks_CT[numbers].flatten()
    early, late = (range(number * size, (number + 1) * size) for number in (ranks.rank, last - ranks.rank))
    own_P = torch.cat([torch.arange(chunk.start, chunk.stop) for chunk in (early, late)])
    return TokenShare(
        ranks,
        (early, late),
        own_P.where(own_P < num_tokens, 0).to(device),
        order_T.to(device),
        order_T.argsort().to(device),
    )


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own_PNH: torch.Tensor, ranks: ContextRanks) -> torch.Tensor:
        ctx.ranks = ranks
        gathered = own_PNH.new_empty((ranks.size * len(own_PNH), *own_PNH.shape[1:]))
        _gather_into(gathered, own_PNH.contiguous(), group=ranks.group)
        return gathered

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        own = grad.new_empty((len(grad) // ctx.ranks.size, *grad.shape[1:]))
        _scatter_into(own, grad.contiguous(), group=ctx.ranks.group)
        return own, None


class _SpreadEntries(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own_M: torch.Tensor, at_M: torch.Tensor, size: int, ranks: ContextRanks) -> torch.Tensor:
        ctx.save_for_backward(at_M)
        all_N = own_M.new_zeros((size, *own_M.shape[1:])).index_copy_(0, at_M, own_M)
        dist.all_reduce(all_N, group=ranks.group)  # the entries of other ranks are zero here
        return all_N

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (at_M,) = ctx.saved_tensors
        return grad.index_select(0, at_M), None, None, None


FLASH_HEAD_DIM = 256
"""Largest head size that the flash kernel supports."""


class Layout(Protocol):
    """Positions of the documents of a batch, and attention between their tokens."""

    @property
    def share(self) -> TokenShare | None:
        """The tokens that this rank computes; None if it computes all."""
        ...

    @property
    def sequences(self) -> DocumentSequences:
        """The documents as sequences, for layers that are not attention."""
        ...

    def attend(
        self,
        q_BLNH: torch.Tensor,
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        *,
        scale: float | None = None,
        variant: Variant = PLAIN,
    ) -> torch.Tensor:
        """Attend within documents. Several query heads may share one head of keys and values.  # [B, L, N, H]"""
        ...


class CurrentLayout:
    """Layout of the batch that a decoder is computing in this thread, shared by its modules. In torch's own threads,
    which may recompute activations for the backward pass, it is the layout of the last batch."""

    def __init__(self) -> None:
        self._of_thread = threading.local()
        self._last: Layout | None = None

    def set(self, layout: Layout) -> None:
        self._of_thread.layout = self._last = layout

    def get(self) -> Layout:
        layout: Layout | None = getattr(self._of_thread, "layout", self._last)
        assert layout is not None, "a pass sets the layout first"
        return layout


PADDING = torch.iinfo(torch.int64).max
"""Position of a padded key: after every query, so that no query attends to it."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Documents of similar length, padded to one width."""

    num_documents: int
    queries_DW: torch.Tensor  # int64 [num_documents or 1, width], positions in the documents
    keys_DK: torch.Tensor  # int64 [num_documents or 1, prefix_width + width], positions in the documents, or PADDING
    prefix_tokens: torch.Tensor | None = None  # [num_documents * prefix_width], padded with token 0
    masks: dict[tuple[int | None, torch.dtype], torch.Tensor] = field(default_factory=dict, compare=False)  # by window

    @property
    def width(self) -> int:
        return self.queries_DW.shape[1]

    @property
    def num_slots(self) -> int:
        return self.num_documents * self.width

    def mask(self, variant: Variant, dtype: torch.dtype) -> torch.Tensor | None:
        """Values to add to the scores: 0 where attention is allowed, and minus infinity elsewhere. None if plain causal
        attention gives the same result. All layers share the tensor, which is kept for the backward pass."""
        window = variant.window
        is_narrow = window is not None and window < self.width
        if self.prefix_tokens is None and not is_narrow and not variant.needs_scores:
            return None
        if (found := self.masks.get((window, dtype))) is None:
            queries, keys = self.queries_DW[:, None, :, None], self.keys_DK[:, None, None]
            allowed = keys <= queries
            if window is not None:
                allowed &= keys > queries - window
            nothing = torch.zeros((), dtype=dtype, device=allowed.device)
            found = self.masks[window, dtype] = nothing.where(allowed, -torch.inf)
        return found


@dataclass(frozen=True, slots=True)
class Kernel:
    """Implementations of torch's scaled dot product attention that a call may use."""

    backends: tuple[SDPBackend, ...] = ()  # empty for any
    takes_groups: bool = True  # supports several query heads for one head of keys and values


def choose_kernel(device_type: str, dtype: torch.dtype, head_dim: int, *, masked: bool) -> Kernel:
    """Choose a kernel that saves no scores for the backward pass, if one supports these heads.

    By default, torch falls back to its math kernel on CUDA for grouped heads with a mask or in float32. That kernel
    saves 12 bytes for each score of each head and layer: tens of gigabytes for a model of 0.6B parameters.
    """
    if device_type != "cuda" or head_dim * dtype.itemsize % 16:
        return Kernel()
    if masked or dtype not in (torch.bfloat16, torch.float16) or head_dim > FLASH_HEAD_DIM:
        return Kernel((SDPBackend.EFFICIENT_ATTENTION,), takes_groups=False)
    return Kernel((SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION))


@dataclass(frozen=True, slots=True)
class DocumentLayout:
    """Slot of every token of a batch when its documents are gathered into buckets.

    `slots` are the positions of all buckets, laid end to end. If ranks share the batch, the tokens are those of this
    rank, and the prefixes those of all ranks.

    Example: one row of five tokens, documents of lengths 3 and 2, in two buckets:

        DocumentLayout(buckets=(Bucket(1, [[0, 1, 2]], [[0, 1, 2]]), Bucket(1, [[0, 1]], [[0, 1]])),
                       token_of_slot=[0, 1, 2, 3, 4], slot_of_token=[0, 1, 2, 3, 4], padded_slots=[])
    """

    buckets: tuple[Bucket, ...]
    token_of_slot: torch.Tensor  # [num_slots]
    slot_of_token: torch.Tensor  # [num_tokens]
    padded_slots: torch.Tensor  # [num_padded_slots]; they repeat token 0
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
        """Attend within documents. Value heads may differ in size from query and key heads.
        # [B, L, N, H]"""
        q, *kv = (x.flatten(0, 1) for x in (q_BLNH, k_BLNH, v_BLNH))
        all_kv = kv
        if self.share is not None:
            all_kv = [self.share.ranks.gather(x) for x in kv]
            kv = [x[self.share.here] for x in all_kv]
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
                    for x, own in zip(all_kv, (k, v), strict=True)
                )
            if torch.is_autocast_enabled(q.device.type):  # here, so that all layers share a mask of this dtype
                q, k, v = (x.to(torch.get_autocast_dtype(q.device.type)) for x in (q, k, v))
            mask = bucket.mask(variant, q.dtype)
            if mask is not None and variant.needs_scores:
                outputs.append(attend_by_scores(q, k, v, mask, scale, variant).flatten(0, 1))
                continue
            kernel = choose_kernel(
                q.device.type, q.dtype, q.shape[-1], masked=mask is not None or q.shape[-1] != v.shape[-1]
            )
            is_grouped = q.shape[2] != k.shape[2]
            if is_grouped and not kernel.takes_groups:
                k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
            with sdpa_kernel(list(kernel.backends)) if kernel.backends else nullcontext():
                out = F.scaled_dot_product_attention(
                    *(x.transpose(1, 2) for x in (q, k, v)),
                    attn_mask=mask,
                    is_causal=mask is None,
                    scale=scale,
                    enable_gqa=is_grouped and kernel.takes_groups,
                )
            outputs.append(out.transpose(1, 2).flatten(0, 1))
        return _Ungather.apply(torch.cat(outputs), self).view(*q_BLNH.shape[:-1], v_BLNH.shape[-1])


def layout_documents(
    documents: Sequence[Document], device: torch.device | str = "cpu", ranks: ContextRanks | None = None
) -> DocumentLayout:
    """Sort documents into buckets, those with a prefix apart from those without.

    Args:
        documents: Documents in token order. Together they cover every token of the batch, padding included.
        ranks: Ranks that share the tokens; None if this rank has all of them.
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
    tokens_of_buckets = [
        _padded([range(piece.start, piece.start + piece.length) for piece in bucket]) for bucket in members
    ]
    token_of_slot = np.concatenate([tokens_DW.ravel() for tokens_DW in tokens_of_buckets])
    is_padded = token_of_slot < 0
    slot_of_token = np.empty(sum(piece.length for piece in pieces), np.int64)
    slot_of_token[token_of_slot[~is_padded]] = np.flatnonzero(~is_padded)
    token_of_slot[is_padded] = 0
    buckets = tuple(_bucket(bucket, share, device) for bucket in members)
    indices = (token_of_slot, slot_of_token, np.flatnonzero(is_padded))
    return DocumentLayout(
        buckets,
        *(torch.from_numpy(each).to(device) for each in indices),
        sequences=DocumentSequences(documents, device),
        share=share,
    )


def _padded(rows: Sequence[range]) -> NDArray[Any]:
    """Ranges as rows, padded with -1 to the longest.  # [rows, width]"""
    starts_R = np.array([row.start for row in rows], np.int64)
    lengths_R = np.array([len(row) for row in rows], np.int64)
    offset_W = np.arange(lengths_R.max())
    return np.where(offset_W < lengths_R[:, None], starts_R[:, None] + offset_W, -1)


@dataclass(frozen=True, slots=True)
class _Piece:
    """A document, or the part of it that lies in one chunk."""

    start: int  # among this rank's tokens
    length: int
    prefix: range  # tokens of the batch that all of it attends to
    cut: range  # earlier tokens of its document, which lie in another chunk

    @property
    def has_prefix(self) -> bool:
        return bool(self.prefix or self.cut)

    def is_like(self, other: _Piece) -> bool:
        """Whether a shorter piece fits the bucket that begins with this one."""
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
    own_1W = torch.arange(pieces[0].length, device=device)[None]
    if not pieces[0].has_prefix:
        return Bucket(len(pieces), own_1W, own_1W)
    prefixes_DP = _padded([piece.prefix for piece in pieces])
    if pieces[0].cut:
        prefixes_DP = np.concatenate([prefixes_DP, _padded([pieces[0].cut])], axis=1)
    tokens_DP = torch.from_numpy(prefixes_DP).to(device)
    in_prefix = tokens_DP >= 0
    # Padding is between the prefix and the document, so positions count only real tokens.
    own_DW = in_prefix.sum(-1, keepdim=True) + own_1W
    keys_DK = torch.cat([(in_prefix.cumsum(-1) - 1).where(in_prefix, PADDING), own_DW], dim=-1)
    tokens = tokens_DP.clamp(min=0).flatten()
    return Bucket(len(pieces), own_DW, keys_DK, tokens if share is None else share.gathered_position_T[tokens])


class _Gather(torch.autograd.Function):
    """Copy tokens to slots. Each token has exactly one slot that is not padding, so the gradient is also a gather, not
    a scatter-add."""

    @staticmethod
    def forward(ctx: Any, x_TNH: torch.Tensor, layout: DocumentLayout) -> torch.Tensor:
        ctx.layout = layout
        return x_TNH.index_select(0, layout.token_of_slot)

    @staticmethod
    def backward(ctx: Any, grad_SNH: torch.Tensor) -> tuple[torch.Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad_SNH.index_select(0, ctx.layout.slot_of_token), None


class _Ungather(torch.autograd.Function):
    """Copy slots back to tokens. Padded slots are not read and receive no gradient."""

    @staticmethod
    def forward(ctx: Any, x_SNH: torch.Tensor, layout: DocumentLayout) -> torch.Tensor:
        ctx.layout = layout
        return x_SNH.index_select(0, layout.slot_of_token)

    @staticmethod
    def backward(ctx: Any, grad_TNH: torch.Tensor) -> tuple[torch.Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        grad = grad_TNH.index_select(0, ctx.layout.token_of_slot)
        return grad.index_fill_(0, ctx.layout.padded_slots, 0), None

"""Causal attention inside each document of packed rows, on any device that has torch's SDPA.

A row holds several documents, and a dense mask over a row costs its length squared. Here documents of similar length
are gathered into one padded batch, where plain causal attention needs no mask: a padded key lies after every real
query of its document, so no real query sees it. The cost is the sum of the squared document lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

import titan_rl.training.device  # noqa: F401  before torchtitan

# isort: split
from torchtitan.protocols.module import Module

MIN_FILL = 0.75
"""A bucket takes documents at least this long relative to its longest one."""


@dataclass(frozen=True, slots=True)
class DocumentLayout:
    """Where every token of a batch goes when its documents are gathered into buckets.

    `slots` are the positions of all buckets, laid end to end.

    Example: one row of five tokens, documents of lengths 3 and 2, in two buckets:

        DocumentLayout(shapes=((1, 3), (1, 2)), token_of_slot=[0, 1, 2, 3, 4], slot_of_token=[0, 1, 2, 3, 4],
                       padded_slots=[])
    """

    shapes: tuple[tuple[int, int], ...]  # (num_documents, width) of each bucket
    token_of_slot: torch.Tensor  # [num_slots]
    slot_of_token: torch.Tensor  # [num_tokens]
    padded_slots: torch.Tensor  # [num_padded_slots]; they repeat token 0


def layout_documents(lengths: Sequence[int], device: torch.device | str = "cpu") -> DocumentLayout:
    """Sort documents into buckets.

    Args:
        lengths: the documents in token order; together they cover every token of the batch, padding included.
    """
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    shapes: list[tuple[int, int]] = []
    token_of_slot: list[int] = []
    slot_of_token = [0] * starts[-1]
    padded_slots: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        start, length = starts[index], lengths[index]
        if shapes and length >= MIN_FILL * shapes[-1][1]:
            shapes[-1] = (shapes[-1][0] + 1, shapes[-1][1])
        else:
            shapes.append((1, length))
        slot, width = len(token_of_slot), shapes[-1][1]
        token_of_slot.extend(range(start, start + length))
        slot_of_token[start : start + length] = range(slot, slot + length)
        token_of_slot.extend([0] * (width - length))
        padded_slots.extend(range(slot + length, slot + width))

    def ints(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    return DocumentLayout(tuple(shapes), ints(token_of_slot), ints(slot_of_token), ints(padded_slots))


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


class DocumentAttention(Module):
    """A torchtitan inner attention that takes a `DocumentLayout` as its attention mask."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__()

    def forward(
        self,
        q_BLNH: torch.Tensor,
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        *,
        attention_masks: DocumentLayout,
        scale: float | None = None,
        enable_gqa: bool = False,
        **_: Any,
    ) -> torch.Tensor:
        """Attend within documents. The batch and length of the result are those of the query.  # [B, L, N, H]"""
        layout = attention_masks
        buckets = [num_documents * width for num_documents, width in layout.shapes]
        slots = (_Gather.apply(x.flatten(0, 1), layout).split(buckets) for x in (q_BLNH, k_BLNH, v_BLNH))
        outputs: list[torch.Tensor] = []
        for (num_documents, width), *qkv in zip(layout.shapes, *slots, strict=True):
            q, k, v = (x.view(num_documents, width, *x.shape[1:]).transpose(1, 2) for x in qkv)
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=enable_gqa)
            outputs.append(out.transpose(1, 2).flatten(0, 1))
        return _Ungather.apply(torch.cat(outputs), layout).view(q_BLNH.shape)

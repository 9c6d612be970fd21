"""Inner attention of torchtitan models over a layout of documents. `attention.py` itself needs only torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

import titan_rl.training.device  # noqa: F401  before torchtitan
from titan_rl.training.attention.attention import Layout

# isort: split
from torchtitan.protocols.module import Module


class DocumentAttention(Module):
    """torchtitan inner attention whose attention mask is a `Layout`, which computes the attention."""

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
        attention_masks: Layout,
        scale: float | None = None,
        enable_gqa: bool = False,
        **_: Any,
    ) -> torch.Tensor:
        """Attend within documents. Batch and length of the result are those of the query.  # [B, L, N, H]"""
        return attention_masks.attend(q_BLNH, k_BLNH, v_BLNH, scale=scale, enable_gqa=enable_gqa)

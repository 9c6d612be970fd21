"""Repair of vLLM's rotary embeddings on a CPU."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

_rotate: Any = RotaryEmbedding.forward_cpu


def repair_rotation() -> None:
    """Make vLLM rotate all heads of queries and keys on a CPU, even if they have a separate dimension for the heads, as
    in LFM2.

    vLLM's CPU kernel infers the number of heads from the last dimension, so it rotates only the first head of
    [T, N, H] (vLLM 0.32).
    """
    RotaryEmbedding.forward_cpu = rotate_heads  # pyright: ignore[reportAttributeAccessIssue]


def rotate_heads(
    rotary: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rotate queries and keys of shape [T, N * H] or [T, N, H] in place."""
    flat = [None if each is None else each.flatten(1) for each in (query, key)]
    turned_query, turned_key = _rotate(rotary, positions, *flat)
    return turned_query.view_as(query), None if key is None else turned_key.view_as(key)

"""Tensors of the dense families that torchtitan trains, computed from config.json by formulas. With them, a model's
folder is checked in milliseconds. Building the policy would take seconds, because it imports torch and torchtitan."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from titan_rl.config.model_files import read_json, tensor_shapes
from titan_rl.core.errors import ModelError
from titan_rl.training.models.families import choose_implementation
from titan_rl.training.settings import ModelConfig

HEAD_NORMS: Mapping[str, bool] = {"qwen3": True, "llama": False}
"""Whether a family normalizes the queries and keys of each head, by `model_type`."""

_COUNTS = (
    "hidden_size",
    "vocab_size",
    "num_hidden_layers",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
)


def is_known_to_fit(model: ModelConfig) -> bool:
    """Whether it is certain that torchtitan can build a model without an adapter, and that its folder has exactly the
    weights that its config.json describes.

    False does not mean that anything is wrong: the model may be of another family or have a field that the formulas do
    not cover, such as scaled rotary embeddings, or the folder may be damaged. Building the policy then shows whether it
    fits, and names what is wrong.
    """
    folder = Path(model.path)
    try:
        hf = read_json(folder, "config.json")
        is_of_torchtitan = choose_implementation(hf, model.implementation).name == "torchtitan"
        expected = expected_shapes(hf, model.max_context) if is_of_torchtitan else None
        return expected is not None and _has_exactly(folder, expected, is_tied=bool(hf.get("tie_word_embeddings")))
    except ModelError:
        return False


def expected_shapes(hf: Mapping[str, Any], max_context: int) -> dict[str, tuple[int, ...]] | None:
    """Compute the shapes of tensors by their Hugging Face names; None if the formulas do not cover a field of
    config.json.

    Args:
        hf: Content of config.json.
        max_context: Most positions that will be used.

    Example: `{"model.norm.weight": (128,), ...}`.
    """
    has_head_norms = HEAD_NORMS.get(str(hf.get("model_type")))
    if has_head_norms is None or not all(_is_count(hf.get(name)) for name in _COUNTS):
        return None
    counts: list[int] = [hf[name] for name in _COUNTS]
    dim, vocabulary, num_layers, hidden_dim, heads, kv_heads = counts
    head_dim: Any = hf.get("head_dim") or dim // heads
    is_plain = (
        _is_count(head_dim)
        and head_dim % 2 == 0  # rotary embeddings rotate pairs
        and heads % kv_heads == 0
        and _is_positive(hf.get("rms_norm_eps"))
        and isinstance(hf.get("tie_word_embeddings", False), bool)
        and _is_count(hf.get("max_position_embeddings", max_context))
        and hf.get("max_position_embeddings", max_context) >= max_context
        and _is_plain_rope(hf)
    )
    if not is_plain:
        return None
    queries, keys = heads * int(head_dim), kv_heads * int(head_dim)
    of_layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (dim,),
        "post_attention_layernorm": (dim,),
        "self_attn.q_proj": (queries, dim),
        "self_attn.k_proj": (keys, dim),
        "self_attn.v_proj": (keys, dim),
        "self_attn.o_proj": (dim, queries),
        "mlp.gate_proj": (hidden_dim, dim),
        "mlp.up_proj": (hidden_dim, dim),
        "mlp.down_proj": (dim, hidden_dim),
    }
    if has_head_norms:
        of_layer |= {"self_attn.q_norm": (head_dim,), "self_attn.k_norm": (head_dim,)}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, dim), "model.norm.weight": (dim,)}
    for layer in range(num_layers):
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in of_layer.items()}
    if not hf.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (vocabulary, dim)
    return shapes


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _is_plain_rope(hf: Mapping[str, Any]) -> bool:
    """Whether rotary embeddings are not scaled."""
    rope: Any = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        return False
    rope = cast("dict[str, Any]", rope)
    if rope.keys() - {"rope_theta", "rope_type", "type"}:
        return False
    kind = rope.get("rope_type", rope.get("type", "default"))
    theta = rope.get("rope_theta", hf.get("rope_theta") or 10000.0)
    return kind == "default" and _is_positive(theta) and "original_max_position_embeddings" not in hf


def _has_exactly(folder: Path, expected: Mapping[str, tuple[int, ...]], *, is_tied: bool) -> bool:
    """Whether the safetensors files of a folder have these tensors, and no other tensors except ones that the trainer
    ignores.

    Raises:
        ModelError: A file is damaged.
    """
    return expected == {
        name: shape
        for name, shape in tensor_shapes(folder).items()
        if not (name == "lm_head.weight" and is_tied) and not name.endswith("rotary_emb.inv_freq")
    }

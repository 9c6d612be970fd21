"""Tiny models with the structure of any config.json, and random weights: to try a family without its weights."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from titan_rl.core.errors import ModelError

VOCABULARY = 128
WINDOW = 8
HEADS = 4
HEAD_DIM = 32

_SIZES: Mapping[str, int] = {
    "hidden_size": HEADS * HEAD_DIM,
    "n_embd": HEADS * HEAD_DIM,
    "word_embed_proj_dim": HEADS * HEAD_DIM,
    "intermediate_size": 96,
    "intermediate_size_mlp": 96,
    "ffn_dim": 96,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32,
    "num_attention_heads": HEADS,
    "n_head": HEADS,
    "head_dim": HEAD_DIM,
    "global_head_dim": HEAD_DIM,
    "query_pre_attn_scalar": HEAD_DIM,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 512,
    "n_positions": 512,
    "sliding_window": WINDOW,
    "sliding_window_size": WINDOW,
    "q_lora_rank": 24,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": HEAD_DIM,
    "qk_rope_head_dim": HEAD_DIM,
    "v_head_dim": HEAD_DIM,
    "first_k_dense_replace": 1,
}
"""Values of a tiny config, for fields that a config has."""

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
PER_LAYER = ("layer_types", "no_rope_layers", "mlp_layer_types", "layers_block_type")
MOST_EXPERTS = 8


def tiny_config(config: Any, **fields: Any) -> Any:
    """A copy of a config of transformers with small dimensions, and as many layers as show all kinds of layers.

    Args:
        fields: further values.
    """
    tiny = deepcopy(config)
    for name, value in _SIZES.items():
        if isinstance(getattr(tiny, name, None), int) and not isinstance(getattr(tiny, name), bool):
            setattr(tiny, name, value)
    if getattr(tiny, "head_dim", HEAD_DIM) is None:
        tiny.head_dim = HEAD_DIM
    heads, kv_heads = config.num_attention_heads, getattr(config, "num_key_value_heads", None)
    if kv_heads is not None:
        tiny.num_key_value_heads = HEADS if kv_heads == heads else 1 if kv_heads == 1 else 2
    for name in _EXPERTS:
        if isinstance(found := getattr(tiny, name, None), int) and found:
            setattr(tiny, name, min(MOST_EXPERTS, found))
    for name in ("num_experts_per_tok", "moe_k", "moe_topk"):
        if isinstance(found := getattr(tiny, name, None), int) and found:
            setattr(tiny, name, min(2, found))
    for name in ("n_group", "topk_group"):
        if isinstance(found := getattr(tiny, name, None), int) and found > 1:
            setattr(tiny, name, 2)
    _shorten(tiny)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if getattr(tiny, name, None) is not None:
            setattr(tiny, name, 0 if name == "pad_token_id" else 1)
    rope = getattr(tiny, "rope_parameters", None)
    if isinstance(rope, dict) and "short_factor" in rope:
        pairs = int(HEAD_DIM * (rope.get("partial_rotary_factor") or 1.0)) // 2
        tiny.rope_parameters = rope | {name: rope[name][:pairs] for name in ("short_factor", "long_factor")}
    for name, value in fields.items():
        setattr(tiny, name, value)
    return tiny


def _shorten(tiny: Any) -> None:
    """Keep the first layers, at least two, up to one of each kind."""
    kinds: list[Any] = list(getattr(tiny, "layer_types", None) or ())
    size = min(2, tiny.num_hidden_layers)
    if kinds:
        size = max(size, *(kinds.index(kind) + 1 for kind in set(kinds)))
    for name in ("interleave_moe_layer_step", "decoder_sparse_step"):
        size = max(size, getattr(tiny, name, None) or 1)
    for name in PER_LAYER:
        if isinstance(found := getattr(tiny, name, None), list):
            setattr(tiny, name, found[:size])
    tiny.num_hidden_layers = size


def make_tiny(config: Any, folder: Path, *, seed: int = 0) -> Path:
    """Write a folder of a model with random weights: config.json and model.safetensors.

    Raises:
        ModelError: transformers cannot build it.
    """
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()
            with torch.no_grad():
                for parameter in model.parameters():
                    # Random weights give nearly uniform distributions; larger ones show differences of logits.
                    if parameter.ndim >= 2:
                        parameter.mul_(4)
                    elif parameter.numel() > 1:
                        parameter.add_(torch.randn_like(parameter), alpha=0.1)  # biases are zero, and norms all alike
                for name, buffer in model.named_buffers():
                    if name.endswith("correction_bias"):
                        buffer.add_(torch.randn_like(buffer), alpha=0.05)
            model.save_pretrained(folder)
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, IndexError) as error:
        raise ModelError(f"transformers cannot build a tiny {config.model_type}: {error}") from error
    return folder


def tiny_of_folder(folder: Path, out: Path) -> Path:
    """Write a tiny model of the family and the structure of a model's config.json.

    Raises:
        ModelError: transformers does not know the family, or cannot build a tiny model of it.
    """
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise ModelError(f"transformers cannot read {folder / 'config.json'}: {error}") from error
    return make_tiny(tiny_config(config), out)

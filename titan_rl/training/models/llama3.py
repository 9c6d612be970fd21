"""Llama 3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import titan_rl.training.device  # noqa: F401  before torchtitan
from titan_rl.errors import ModelError
from titan_rl.training.models.architecture import Architecture, Dimensions

# isort: split
from torchtitan.models.common import ComplexRoPE
from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock
from torchtitan.models.llama3.sharding import set_llama3_sharding_config
from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter


def _build(size: Dimensions, hf: Mapping[str, Any]) -> Llama3Model.Config:
    rope = ComplexRoPE.Config(
        dim=size.head_dim, max_seq_len=size.max_context, theta=float(size.rope["rope_theta"]), **_scaling(size.rope)
    )
    layers = [
        Llama3TransformerBlock.Config(
            attention_norm=size.norm(),
            ffn_norm=size.norm(),
            attention=size.attention(rope),
            feed_forward=size.feed_forward(),
        )
        for _ in range(size.num_layers)
    ]
    return size.decoder(Llama3Model.Config, layers)


def _scaling(rope: Mapping[str, Any]) -> dict[str, Any]:
    match rope["rope_type"]:
        case "default":
            return {}
        case "llama3":
            return {
                "scaling": "llama",
                "scaling_factor": float(rope["factor"]),
                "low_freq_factor": float(rope["low_freq_factor"]),
                "high_freq_factor": float(rope["high_freq_factor"]),
                "original_max_position_embeddings": int(rope["original_max_position_embeddings"]),
            }
        case other:
            raise ModelError(f"config.json has rope type {other!r}; only 'default' and 'llama3' are supported")


LLAMA3 = Architecture(
    supported={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
    build=_build,
    adapter=Llama3StateDictAdapter,
    plan_sharding=lambda config: set_llama3_sharding_config(config, enable_sp=False),
)

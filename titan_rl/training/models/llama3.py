"""Llama 3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import titan_rl.training.device  # noqa: F401  before torchtitan
from titan_rl.training.models.architecture import Architecture, Dimensions, PairsRoPE, rope_scaling

# isort: split
from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock
from torchtitan.models.llama3.sharding import set_llama3_sharding_config
from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter


def _build(size: Dimensions, hf: Mapping[str, Any]) -> Llama3Model.Config:
    rope = PairsRoPE.Config(
        dim=size.head_dim,
        max_seq_len=size.max_context,
        theta=float(size.rope["rope_theta"]),
        **rope_scaling(size.rope, ("default", "llama3", "yarn")),
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


LLAMA3 = Architecture(
    supported={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
    build=_build,
    adapter=Llama3StateDictAdapter,
    plan_sharding=lambda config: set_llama3_sharding_config(config, enable_sp=False),
)

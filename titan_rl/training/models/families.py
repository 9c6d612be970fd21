"""Model families of torchtitan's implementation: Qwen3, dense and with a mixture of experts, and Llama 3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import titan_rl.training.device  # noqa: F401  before torchtitan
from titan_rl.core.errors import ModelError
from titan_rl.training.models.architecture import Architecture, Dimensions, HalvesRoPE, PairsRoPE, rope_scaling
from titan_rl.training.models.choice import TORCHTITAN_ROPE
from titan_rl.training.models.experts import moe_config

# isort: split
from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock
from torchtitan.models.llama3.sharding import set_llama3_sharding_config
from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter
from torchtitan.models.qwen3.model import Qwen3Model, Qwen3TransformerBlock
from torchtitan.models.qwen3.sharding import set_qwen3_sharding_config
from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter


def _build_qwen3(size: Dimensions, hf: Mapping[str, Any]) -> Qwen3Model.Config:
    rope = HalvesRoPE.Config(
        dim=size.head_dim,
        max_seq_len=size.max_context,
        theta=float(size.rope["rope_theta"]),
        **rope_scaling(size.rope, TORCHTITAN_ROPE["qwen3"]),
    )
    layers = [
        Qwen3TransformerBlock.Config(
            attention_norm=size.norm(),
            ffn_norm=size.norm(),
            attention=size.attention(rope, qk_norm=size.norm(size.head_dim)),
            **_mlp(size, hf),
        )
        for _ in range(size.num_layers)
    ]
    return size.decoder(Qwen3Model.Config, layers)


def _mlp(size: Dimensions, hf: Mapping[str, Any]) -> dict[str, Any]:
    if hf["model_type"] == "qwen3":
        return {"feed_forward": size.feed_forward()}
    num_experts = hf.get("num_experts", hf.get("num_local_experts"))
    if num_experts is None:
        raise ModelError("config.json lacks 'num_experts'")
    try:
        hidden_dim, top_k = hf["moe_intermediate_size"], hf["num_experts_per_tok"]
    except KeyError as error:
        raise ModelError(f"config.json lacks {error.args[0]!r}") from None
    return {
        "moe": moe_config(
            dim=size.dim,
            hidden_dim=hidden_dim,
            num_experts=num_experts,
            top_k=top_k,
            renormalize=bool(hf.get("norm_topk_prob", False)),
        )
    }


QWEN3 = Architecture(
    build=_build_qwen3,
    adapter=Qwen3StateDictAdapter,
    plan_sharding=lambda config: set_qwen3_sharding_config(config, enable_sp=False, enable_ep=False),
)


def _build_llama3(size: Dimensions, hf: Mapping[str, Any]) -> Llama3Model.Config:
    rope = PairsRoPE.Config(
        dim=size.head_dim,
        max_seq_len=size.max_context,
        theta=float(size.rope["rope_theta"]),
        **rope_scaling(size.rope, TORCHTITAN_ROPE["llama"]),
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
    build=_build_llama3,
    adapter=Llama3StateDictAdapter,
    plan_sharding=lambda config: set_llama3_sharding_config(config, enable_sp=False),
)

ARCHITECTURES: dict[str, Architecture] = {"qwen3": QWEN3, "qwen3_moe": QWEN3, "llama": LLAMA3}
"""Families by the `model_type` of their config.json. `choice.py` lists the values of its fields that they support."""

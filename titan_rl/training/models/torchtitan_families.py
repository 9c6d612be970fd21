"""Model families of torchtitan's implementation, built from config.json: Qwen3, dense and with a mixture of experts,
and Llama 3. The attention, the output layer and the rotary embeddings of torchtitan's models are replaced.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

import titan_rl.training.device  # noqa: F401  before torchtitan
from titan_rl.core.errors import ModelError
from titan_rl.training.attention.attention import Layout
from titan_rl.training.models.experts import Experts, Router
from titan_rl.training.selected_logprobs import VocabularyShard, selected_logprobs

# isort: split
from torchtitan.models.common import ComplexRoPE, CosSinRoPE, Embedding
from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import MoE, RoutedExperts
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher
from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock
from torchtitan.models.llama3.sharding import set_llama3_sharding_config
from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter
from torchtitan.models.qwen3.model import Qwen3Model, Qwen3TransformerBlock
from torchtitan.models.qwen3.sharding import set_qwen3_sharding_config
from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter
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
        **_: Any,
    ) -> torch.Tensor:
        """Attend within documents. Batch and length of the result are those of the query.  # [B, L, N, H]"""
        return attention_masks.attend(q_BLNH, k_BLNH, v_BLNH, scale=scale)


class VocabularyHead(Linear):
    """torchtitan's output layer, extended to score tokens. With tensor parallelism each rank has a part of the
    vocabulary, and scoring gathers no logits."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        pass

    def forward(
        self,
        hidden_ND: torch.Tensor,
        targets_N: torch.Tensor | None = None,
        temperatures_N: torch.Tensor | None = None,
    ) -> Any:
        """Return the whole logits on every rank, [N, V]. With targets and their temperatures, return the result of
        `selected_logprobs` instead."""
        weight_VD, shard = self.weight, None
        if torch.is_autocast_enabled(hidden_ND.device.type):
            dtype = torch.get_autocast_dtype(hidden_ND.device.type)
            hidden_ND, weight_VD = hidden_ND.to(dtype), weight_VD.to(dtype)
        if isinstance(weight_VD, DTensor):
            _, (start, _) = compute_local_shape_and_global_offset(
                weight_VD.shape, weight_VD.device_mesh, weight_VD.placements
            )
            weight_VD, shard = weight_VD.to_local(), VocabularyShard(start, weight_VD.device_mesh)
        if targets_N is None or temperatures_N is None:
            logits_NV = F.linear(hidden_ND, weight_VD)
            if shard is None:
                return logits_NV
            shape = torch.Size((len(hidden_ND), len(self.weight)))  # ranks may have unequal parts
            of_all = DTensor.from_local(logits_NV, shard.mesh, [Shard(-1)], shape=shape, stride=(shape[1], 1))
            return of_all.full_tensor()
        with torch.autocast(hidden_ND.device.type, enabled=False):
            return selected_logprobs(hidden_ND, weight_VD, targets_N, temperatures_N, shard=shard)


class HalvesRoPE(CosSinRoPE):
    """torchtitan's rotation of the halves of a head, with YaRN's attention factor.

    torchtitan omits YaRN's factor on attention scores. Here it is applied to cosines and sines, as in transformers and
    vLLM: queries and keys are each scaled by its square root.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):
        attention_factor: float = 1.0

    config: Config

    def _precompute_cache(self) -> torch.Tensor:
        return super()._precompute_cache() * self.config.attention_factor


class PairsRoPE(ComplexRoPE):
    """torchtitan's rotation of neighbouring entries, with YaRN's attention factor; see `HalvesRoPE`."""

    @dataclass(kw_only=True, slots=True)
    class Config(ComplexRoPE.Config):
        attention_factor: float = 1.0

    config: Config

    def _precompute_cache(self) -> torch.Tensor:
        return super()._precompute_cache() * self.config.attention_factor


def _rope_scaling(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Convert `rope_parameters` of config.json, of a type in families.toml, to arguments of `HalvesRoPE.Config` and
    `PairsRoPE.Config`.

    Raises:
        ModelError: A value is missing.

    Example: factor 4 over 32,768 positions, `{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings":
    32768}`, scales attention by (0.1 ln 4 + 1)^2.
    """
    rope_type = rope["rope_type"]
    try:
        match rope_type:
            case "llama3":
                return {
                    "scaling": "llama",
                    "scaling_factor": float(rope["factor"]),
                    "low_freq_factor": float(rope["low_freq_factor"]),
                    "high_freq_factor": float(rope["high_freq_factor"]),
                    "original_max_position_embeddings": int(rope["original_max_position_embeddings"]),
                }
            case "yarn":
                return {
                    "scaling": "yarn",
                    "rope_factor": float(rope["factor"]),
                    "beta_fast": float(rope.get("beta_fast") or 32),
                    "beta_slow": float(rope.get("beta_slow") or 1),
                    "original_seq_len": int(rope["original_max_position_embeddings"]),
                    "truncate": bool(rope.get("truncate", True)),
                    "attention_factor": _attention_factor(rope),
                }
            case _:
                return {}
    except KeyError as error:
        raise ModelError(f"config.json lacks {error.args[0]!r} in its rope parameters of type {rope_type!r}") from None


def _attention_factor(rope: Mapping[str, Any]) -> float:
    """Scale of YaRN's cosines and sines (arXiv:2309.00071, section 3.4)."""
    if (given := rope.get("attention_factor")) is not None:
        return float(given)

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(rope["factor"]) + 1.0 if rope["factor"] > 1 else 1.0

    weight, of_all = rope.get("mscale"), rope.get("mscale_all_dim")
    return scale(weight) / scale(of_all) if weight and of_all else scale(1.0)


def _keep(parameter: Any) -> None:
    """Initializer that does nothing, since weights are always loaded. torchtitan's configs require one."""


KEPT: dict[str, Callable[..., Any]] = {"weight": _keep}

REQUIRED = (
    "hidden_size",
    "vocab_size",
    "rms_norm_eps",
    "num_hidden_layers",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
)


def _rope_parameters(hf: Mapping[str, Any], positions: int) -> dict[str, Any]:
    """Base and scaling of the rotary embeddings, with the defaults of fields that config.json leaves out."""
    rope = dict(hf.get("rope_parameters") or hf.get("rope_scaling") or {})
    rope.setdefault("rope_type", rope.get("type", "default"))
    rope.setdefault("rope_theta", hf.get("rope_theta") or 10000.0)
    rope.setdefault("original_max_position_embeddings", hf.get("original_max_position_embeddings", positions))
    if rope["rope_type"] == "yarn" and rope.get("factor") is None:
        rope["factor"] = positions / rope["original_max_position_embeddings"]
    return rope


def _mlp(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Config of the part of a layer after the attention, by the name of its field."""
    if hf["model_type"] == "qwen3_moe":
        return {"moe": _mixture(hf)}
    dim, hidden_dim = hf["hidden_size"], hf["intermediate_size"]
    return {"feed_forward": make_ffn_config(dim=dim, hidden_dim=hidden_dim, w1_param_init=KEPT, w2w3_param_init=KEPT)}


def _mixture(hf: Mapping[str, Any]) -> MoE.Config:
    """Config of a router that takes the best experts of a softmax, without shared experts or a balancing bias.

    Raises:
        ModelError: A field of config.json is missing.
    """
    num_experts = hf.get("num_experts", hf.get("num_local_experts"))
    if num_experts is None:
        raise ModelError("config.json lacks 'num_experts'")
    try:
        dim, hidden_dim, top_k = hf["hidden_size"], hf["moe_intermediate_size"], hf["num_experts_per_tok"]
    except KeyError as error:
        raise ModelError(f"config.json lacks {error.args[0]!r}") from None
    return MoE.Config(
        num_experts=num_experts,
        load_balance_coeff=None,
        router=Router.Config(
            num_experts=num_experts,
            gate=Linear.Config(in_features=dim, out_features=num_experts, bias=False, param_init=KEPT),
            top_k=top_k,
            score_func="softmax",
            route_norm=bool(hf.get("norm_topk_prob", False)),
        ),
        routed_experts=RoutedExperts.Config(
            inner_experts=Experts.Config(
                dim=dim,
                hidden_dim=hidden_dim,
                num_experts=num_experts,
                param_init=dict.fromkeys(("w1_EFD", "w2_EDF", "w3_EFD"), _keep),
            ),
            token_dispatcher=LocalTokenDispatcher.Config(num_experts=num_experts, top_k=top_k),
        ),
    )


@dataclass(frozen=True, slots=True)
class Architecture:
    """A model family of torchtitan.

    Args:
        model: Class of the model.
        block: Class of its layers.
        rope: Class of its rotary embeddings.
        adapter: Class that translates parameter names.
        plan_sharding: Sets the tensor-parallel sharding in a model config.
        has_qk_norm: Whether queries and keys are normalized.
    """

    model: type[Any]
    block: type[Any]
    rope: type[Any]
    adapter: type[Any]
    plan_sharding: Callable[[Any], None]
    has_qk_norm: bool = False

    def config(self, hf: Mapping[str, Any], max_context: int) -> Any:
        """Build torchtitan's model config.

        Args:
            hf: Content of config.json.
            max_context: Maximum number of positions; this determines the size of the rotary caches.

        Raises:
            ModelError: A field is missing, or the model has fewer positions than `max_context`.
        """
        if (missing := next((name for name in REQUIRED if name not in hf), None)) is not None:
            raise ModelError(f"config.json lacks {missing!r}")
        positions = hf.get("max_position_embeddings", max_context)
        if positions < max_context:
            raise ModelError(f"config.json has max_position_embeddings {positions}; {max_context} positions are needed")
        dim, num_heads, vocab_size = hf["hidden_size"], hf["num_attention_heads"], hf["vocab_size"]
        head_dim = hf.get("head_dim") or dim // num_heads
        parameters = _rope_parameters(hf, positions)
        theta = float(parameters["rope_theta"])
        rope = self.rope.Config(dim=head_dim, max_seq_len=max_context, theta=theta, **_rope_scaling(parameters))

        def norm(size: int) -> RMSNorm.Config:
            return RMSNorm.Config(normalized_shape=size, eps=hf["rms_norm_eps"], param_init=KEPT)

        layers = [
            self.block.Config(
                attention_norm=norm(dim),
                ffn_norm=norm(dim),
                attention=make_gqa_config(
                    dim=dim,
                    n_heads=num_heads,
                    n_kv_heads=hf["num_key_value_heads"],
                    head_dim=head_dim,
                    wqkv_param_init=KEPT,
                    wo_param_init=KEPT,
                    inner_attention=DocumentAttention.Config(),
                    # Separate projections have the layout of the published weights, so publishing needs no copy.
                    fuse_qkv=False,
                    rope=rope,
                    qk_norm=norm(head_dim) if self.has_qk_norm else None,
                ),
                **_mlp(hf),
            )
            for _ in range(hf["num_hidden_layers"])
        ]
        return self.model.Config(
            dim=dim,
            vocab_size=vocab_size,
            norm=norm(dim),
            enable_weight_tying=bool(hf.get("tie_word_embeddings", False)),
            tok_embeddings=Embedding.Config(num_embeddings=vocab_size, embedding_dim=dim, param_init=KEPT),
            lm_head=VocabularyHead.Config(in_features=dim, out_features=vocab_size, param_init=KEPT),
            layers=layers,
        )


QWEN3 = Architecture(
    Qwen3Model,
    Qwen3TransformerBlock,
    HalvesRoPE,
    Qwen3StateDictAdapter,
    lambda config: set_qwen3_sharding_config(config, enable_sp=False, enable_ep=False),
    has_qk_norm=True,
)

LLAMA3 = Architecture(
    Llama3Model,
    Llama3TransformerBlock,
    PairsRoPE,
    Llama3StateDictAdapter,
    lambda config: set_llama3_sharding_config(config, enable_sp=False),
)

ARCHITECTURES: dict[str, Architecture] = {"qwen3": QWEN3, "qwen3_moe": QWEN3, "llama": LLAMA3}
"""Families by the `model_type` of their config.json. families.toml has the supported values of its fields."""

"""Parts that torchtitan's model families share, and the interface by which a family is trained from a Hugging Face
folder.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

import titan_rl.training.device  # noqa: F401  before torchtitan
from titan_rl.core.errors import ModelError
from titan_rl.training.attention.document_attention import DocumentAttention
from titan_rl.training.selected_logprobs import VocabularyShard, selected_logprobs

# isort: split
from torchtitan.models.common import ComplexRoPE, CosSinRoPE, Embedding
from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.common.rope import RoPE


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


@dataclass(frozen=True, slots=True)
class Architecture:
    """One `model_type` of config.json.

    Args:
        build: Builds torchtitan's model config from the dimensions and config.json.
        adapter: Class of torchtitan that translates parameter names.
        plan_sharding: Sets the tensor-parallel sharding in a model config.
    """

    build: Callable[[Dimensions, Mapping[str, Any]], Any]
    adapter: type[Any]
    plan_sharding: Callable[[Any], None]


@dataclass(frozen=True, slots=True)
class Dimensions:
    """Dimensions of a decoder, and the parts of a model config that follow from them."""

    dim: int
    vocab_size: int
    eps: float
    num_layers: int
    hidden_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_context: int
    rope: Mapping[str, Any] = field(default_factory=dict[str, Any])  # rope_theta and the scaling
    tied: bool = False

    @classmethod
    def of(cls, hf: Mapping[str, Any], max_context: int) -> Dimensions:
        """Read the dimensions of a config.json.

        Raises:
            ModelError: A field is missing, or the model has fewer positions than `max_context`.
        """
        if (missing := next((name for name in REQUIRED if name not in hf), None)) is not None:
            raise ModelError(f"config.json lacks {missing!r}")
        positions = hf.get("max_position_embeddings", max_context)
        if positions < max_context:
            raise ModelError(f"config.json has max_position_embeddings {positions}; {max_context} positions are needed")
        rope = dict(hf.get("rope_parameters") or hf.get("rope_scaling") or {})
        rope.setdefault("rope_type", rope.get("type", "default"))
        rope.setdefault("rope_theta", hf.get("rope_theta") or 10000.0)
        rope.setdefault("original_max_position_embeddings", hf.get("original_max_position_embeddings", positions))
        if rope["rope_type"] == "yarn" and rope.get("factor") is None:
            rope["factor"] = positions / rope["original_max_position_embeddings"]
        return cls(
            dim=hf["hidden_size"],
            vocab_size=hf["vocab_size"],
            eps=hf["rms_norm_eps"],
            num_layers=hf["num_hidden_layers"],
            hidden_dim=hf["intermediate_size"],
            num_heads=hf["num_attention_heads"],
            num_kv_heads=hf["num_key_value_heads"],
            head_dim=hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"],
            max_context=max_context,
            rope=rope,
            tied=bool(hf.get("tie_word_embeddings", False)),
        )

    def norm(self, size: int | None = None) -> RMSNorm.Config:
        return RMSNorm.Config(normalized_shape=size or self.dim, eps=self.eps, param_init=KEPT)

    def attention(self, rope: RoPE.Config, *, qk_norm: RMSNorm.Config | None = None) -> Any:
        return make_gqa_config(
            dim=self.dim,
            n_heads=self.num_heads,
            n_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            wqkv_param_init=KEPT,
            wo_param_init=KEPT,
            inner_attention=DocumentAttention.Config(),
            # Separate projections have the layout of the published weights, so publishing needs no copy.
            fuse_qkv=False,
            rope=rope,
            qk_norm=qk_norm,
        )

    def feed_forward(self) -> Any:
        return make_ffn_config(dim=self.dim, hidden_dim=self.hidden_dim, w1_param_init=KEPT, w2w3_param_init=KEPT)

    def decoder(self, config_class: type[Any], layers: list[Any]) -> Any:
        return config_class(
            dim=self.dim,
            vocab_size=self.vocab_size,
            norm=self.norm(),
            enable_weight_tying=self.tied,
            tok_embeddings=Embedding.Config(num_embeddings=self.vocab_size, embedding_dim=self.dim, param_init=KEPT),
            lm_head=VocabularyHead.Config(in_features=self.dim, out_features=self.vocab_size, param_init=KEPT),
            layers=layers,
        )


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


def rope_scaling(rope: Mapping[str, Any], supported: tuple[str, ...]) -> dict[str, Any]:
    """Convert `rope_parameters` of config.json to arguments of `HalvesRoPE.Config` and `PairsRoPE.Config`.

    Raises:
        ModelError: The type is not supported, or a value is missing.

    Example: factor 4 over 32,768 positions, `{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings":
    32768}`, scales attention by (0.1 ln 4 + 1)^2.
    """
    rope_type = rope["rope_type"]
    if rope_type not in supported:
        names = " and ".join(repr(name) for name in supported)
        raise ModelError(f"config.json has rope type {rope_type!r}; only {names} are supported")
    if (share := rope.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ModelError(f"config.json has partial_rotary_factor {share}; only 1.0 is supported")
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

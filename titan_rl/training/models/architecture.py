"""What the library needs to know of a model family to train it from a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import titan_rl.training.device  # noqa: F401  before torchtitan
from titan_rl.core.errors import ModelError
from titan_rl.training.attention.document_attention import DocumentAttention
from titan_rl.training.models.vocabulary_head import VocabularyHead

# isort: split
from torchtitan.models.common import Embedding
from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.common.rope import RoPE


def _keep(parameter: Any) -> None:
    """Weights are loaded, never drawn; torchtitan's configs ask for a way to draw them all the same."""


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
        supported: fields of config.json that have to have this value, which is also what a missing one means.
        build: torchtitan's model config from the dimensions and config.json.
        adapter: torchtitan's translation of parameter names.
        plan_sharding: writes into a model config how tensor parallel splits it.
    """

    supported: Mapping[str, Any]
    build: Callable[[Dimensions, Mapping[str, Any]], Any]
    adapter: type[Any]
    plan_sharding: Callable[[Any], None]


@dataclass(frozen=True, slots=True)
class Dimensions:
    """The numbers that decoders share, and the parts of a model config that follow from them alone."""

    dim: int
    vocab_size: int
    eps: float
    num_layers: int
    hidden_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_context: int
    rope: Mapping[str, Any] = field(default_factory=dict[str, Any])  # rope_theta and what scales it
    tied: bool = False

    @classmethod
    def of(cls, hf: Mapping[str, Any], max_context: int) -> Dimensions:
        """
        Raises:
            ModelError: a field is missing, or the model has fewer positions than `max_context`.
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
            # Separate projections have the layout of the published weights, so publishing copies nothing.
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

"""Rotary position embeddings of torchtitan's models, configured by what config.json says of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

import titan_rl.training.device  # noqa: F401  before torchtitan
from titan_rl.core.errors import ModelError

# isort: split
from torchtitan.models.common import ComplexRoPE, CosSinRoPE


class HalvesRoPE(CosSinRoPE):
    """torchtitan's rotation of a head's halves, scaled as YaRN scales it.

    torchtitan leaves the factor on attention scores out of YaRN; with it in cosines and sines, queries and keys both
    carry its root, as in transformers and vLLM.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):
        attention_factor: float = 1.0

    config: Config

    def _precompute_cache(self) -> torch.Tensor:
        return super()._precompute_cache() * self.config.attention_factor


class PairsRoPE(ComplexRoPE):
    """torchtitan's rotation of neighbouring entries, scaled as `HalvesRoPE` is."""

    @dataclass(kw_only=True, slots=True)
    class Config(ComplexRoPE.Config):
        attention_factor: float = 1.0

    config: Config

    def _precompute_cache(self) -> torch.Tensor:
        return super()._precompute_cache() * self.config.attention_factor


def rope_scaling(rope: Mapping[str, Any], supported: tuple[str, ...]) -> dict[str, Any]:
    """The arguments of `HalvesRoPE.Config` and `PairsRoPE.Config` for `rope_parameters` of config.json.

    Raises:
        ModelError: it is of a type that is not supported, or lacks a value.

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
    """The scale of YaRN's cosines and sines (arXiv:2309.00071, section 3.4)."""
    if (given := rope.get("attention_factor")) is not None:
        return float(given)

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(rope["factor"]) + 1.0 if rope["factor"] > 1 else 1.0

    weight, of_all = rope.get("mscale"), rope.get("mscale_all_dim")
    return scale(weight) / scale(of_all) if weight and of_all else scale(1.0)

"""Choice of a policy's implementation from config.json. Untrainable models are rejected before a run starts."""

from __future__ import annotations

import json
from typing import Any

import pytest
from models.families import RESULTS, model_type

from titan_rl.core.errors import ModelError
from titan_rl.training.models.families import DIVIDED, choose_implementation, longest_context


@pytest.mark.parametrize(
    ("hf", "name", "reason"),
    [
        ({"model_type": "qwen3"}, "torchtitan", "it has this family"),
        ({"model_type": "qwen2"}, "transformers", "no model_type 'qwen2'"),
        ({"model_type": "qwen3", "attention_bias": True}, "transformers", "supports only attention_bias False"),
        ({"model_type": "llama", "rope_scaling": {"type": "linear"}}, "transformers", "rope type 'linear'"),
        ({"model_type": "qwen3", "rope_parameters": {"partial_rotary_factor": 0.5}}, "transformers", "partial_rotary"),
    ],
)
def test_auto_chooses_torchtitan_for_supported_families(hf: dict[str, Any], name: str, reason: str) -> None:
    chosen = choose_implementation(hf)
    assert chosen.name == name
    assert reason in chosen.reason


def test_sizes_may_be_null_or_per_layer() -> None:
    hf = {
        "model_type": "qwen2",
        "num_key_value_heads": None,
        "num_attention_heads": [4, 8],
        "quantization_config": None,
    }
    assert choose_implementation(hf).name == "transformers"


@pytest.mark.parametrize("place", ["rope_parameters", "rope_scaling"])
def test_longest_context_of_longrope_is_the_original_context(place: str) -> None:
    rope = {"rope_type": "longrope"} if place == "rope_parameters" else {"type": "longrope"}
    phi3 = {"max_position_embeddings": 131072, "original_max_position_embeddings": 4096, place: rope}
    assert longest_context(phi3) == 4096
    assert (
        longest_context({"max_position_embeddings": 131072, place: rope | {"original_max_position_embeddings": 8}}) == 8
    )
    assert longest_context(phi3 | {place: {"rope_type": "yarn"}}) == 131072
    assert longest_context({}) is None


def test_explicit_implementation_is_used() -> None:
    assert choose_implementation({"model_type": "qwen3"}, "transformers").name == "transformers"
    with pytest.raises(ModelError, match=r'model.implementation = "torchtitan": .* no model_type \'qwen2\''):
        choose_implementation({"model_type": "qwen2"}, "torchtitan")


@pytest.mark.parametrize(
    ("hf", "message"),
    [
        ({"model_type": "minimax"}, "lightning attentions pass a state from token to token"),
        (
            {"model_type": "new", "layer_types": ["full_attention", "conv"]},
            "'conv' have a recurrent state, and titan_rl does not know the module",
        ),
        ({"model_type": "gemma3", "text_config": {}}, "reads more than text"),
        ({"model_type": "t5gemma", "is_encoder_decoder": True}, "has an encoder"),
        ({"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}, r"quantized \(mxfp4\)"),
        ({"model_type": "qwen3", "quantization_config": {"quant_method": "fp8"}}, r"quantized \(fp8\); save them in"),
        ({"model_type": "mistral", "rope_scaling": {"type": "dynamic"}}, "rope type 'dynamic'"),
        (
            {"model_type": "qwen2", "num_attention_heads": 4, "num_key_value_heads": 3},
            "num_attention_heads = 4 and num_key_value_heads = 3; the first must be a multiple",
        ),
        ({"model_type": "qwen2", "num_hidden_layers": 0}, "num_hidden_layers = 0; it must be an integer of at least 1"),
        ({"model_type": "qwen2", "hidden_size": "64"}, "hidden_size = '64'; it must be an integer of at least 1"),
        (
            {"model_type": "qwen2", "rope_parameters": {"rope_theta": -10000.0}},
            "rope_parameters.rope_theta = -10000.0; it must be a number above 0",
        ),
        (
            {"model_type": "gemma3_text", "rope_parameters": {"full_attention": {"rope_theta": 0}}},
            "rope_parameters.full_attention.rope_theta = 0; it must be a number above 0",
        ),
        ({"model_type": "qwen3", "rms_norm_eps": float("nan")}, "rms_norm_eps = nan, which is not a number"),
        (
            {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 9},
            "gives each token 9 experts, and has 8 of them; num_experts_per_tok must be at most that",
        ),
    ],
)
def test_rejects_untrainable_models_with_the_reason(hf: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        choose_implementation(hf)


@pytest.mark.parametrize(
    ("hf", "message"),
    [
        ({"model_type": "qwen3"}, r"expert_parallel = 4, and config.json has no experts to divide .*; set it to 1"),
        ({"model_type": "qwen3_moe", "num_experts": 6}, r"expert_parallel = 4 does not divide the model's 6 experts"),
        (
            {"model_type": "ernie4_5_moe", "moe_num_experts": 6},
            r"expert_parallel = 4 does not divide the model's 6 experts",
        ),
        ({"model_type": "new_moe", "num_experts": 8}, r"the experts of model_type 'new_moe' have not been divided"),
    ],
)
def test_rejects_unsupported_expert_parallelism(hf: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        choose_implementation(hf, expert_parallel=4)


def test_expert_parallel_families_are_the_tested_ones() -> None:
    proved = {model_type(name) for name, found in json.loads(RESULTS.read_text()).items() if found["i"] == "yes"}
    assert proved == DIVIDED


def test_rejects_context_parallelism_for_recurrent_families() -> None:
    assert choose_implementation({"model_type": "qwen3_next"}).name == "transformers"
    with pytest.raises(ModelError, match=r"context_parallel = 2, and model_type 'qwen3_next' has .* set it to 1"):
        choose_implementation({"model_type": "qwen3_next"}, context_parallel=2)


def test_rejects_tensor_parallelism_for_transformers() -> None:
    with pytest.raises(ModelError, match=r"tensor_parallel = 2, .* does not split matrices; set"):
        choose_implementation({"model_type": "qwen2"}, tensor_parallel=2)

"""Tiny configs keep the specifics of a model and change only sizes."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torchtitan", reason="needs the cpu or gpu extra")

from transformers import AutoConfig

from titan_rl.core.errors import ModelError
from titan_rl.training.models.families import PROVED
from titan_rl.training.models.shrunken_models import HEAD_DIM, MOST_LAYERS, make_tiny, tiny_config

SIZES = {
    "hidden_size", "n_embd", "intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size",
    "num_attention_heads", "n_head", "num_key_value_heads", "num_hidden_layers", "n_layer", "head_dim", "vocab_size",
    "max_position_embeddings", "n_positions", "original_max_position_embeddings", "sliding_window", "num_experts",
    "num_local_experts", "n_routed_experts", "moe_num_experts", "num_experts_per_tok", "moe_k", "n_group", "topk_group",
    "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "qk_head_dim",
    "query_pre_attn_scalar", "rotary_dim", "layer_types", "no_rope_layers", "mlp_layer_types", "mlp_only_layers",
    "first_k_dense_replace", "moe_layer_start_index", "moe_layer_end_index", "max_window_layers", "pad_token_id",
    "bos_token_id", "eos_token_id", "rope_parameters", "initializer_range", "linear_key_head_dim", "linear_head_dim",
    "linear_value_head_dim", "linear_num_key_heads", "linear_num_value_heads", "linear_num_heads", "mamba_d_state",
    "ssm_state_size", "state_size", "mamba_dt_rank", "time_step_rank", "mamba_chunk_size", "chunk_size", "num_heads",
    "mamba_d_ssm", "mamba_n_heads", "mamba_d_head", "mamba_num_heads", "mamba_head_dim", "n_groups", "full_attn_idxs",
    "layers_block_type", "shared_intermediate_size", "moe_shared_expert_intermediate_size", "num_experts_per_token",
    "model_max_length",
}  # fmt: skip
"""Fields that may change."""


def shrunk(model_type: str, **fields: Any) -> tuple[Any, Any]:
    config = AutoConfig.for_model(model_type, **fields)
    return config, tiny_config(config)


@pytest.mark.parametrize("model_type", sorted(PROVED))
def test_tiny_config_changes_only_sizes(model_type: str) -> None:
    config, tiny = shrunk(model_type)
    before, after = config.to_dict(), tiny.to_dict()
    assert before.keys() == after.keys()
    assert {name for name in before if before[name] != after[name]} <= SIZES
    kv_heads, tiny_kv_heads = (getattr(each, "num_key_value_heads", None) for each in (config, tiny))
    if kv_heads is not None:
        assert (kv_heads == 1) == (tiny_kv_heads == 1)
        assert (kv_heads == config.num_attention_heads) == (tiny_kv_heads == tiny.num_attention_heads)
    assert {*(config.to_dict().get("layer_types") or ())} == {*(tiny.to_dict().get("layer_types") or ())}
    rope = config.to_dict().get("rope_parameters") or {}
    for name, value in (tiny.to_dict().get("rope_parameters") or {}).items():
        assert name == "original_max_position_embeddings" or value == rope[name]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "expected"),
    [(14, 2, (8, 2)), (24, 8, (6, 2)), (32, 16, (4, 2)), (32, 32, (4, 4)), (8, 1, (4, 1))],
)
def test_query_to_key_head_ratio_is_kept_up_to_four(heads: int, kv_heads: int, expected: tuple[int, int]) -> None:
    _, tiny = shrunk("qwen2", hidden_size=64 * heads, num_attention_heads=heads, num_key_value_heads=kv_heads)
    assert (tiny.num_attention_heads, tiny.num_key_value_heads) == expected
    assert tiny.hidden_size == expected[0] * HEAD_DIM


@pytest.mark.parametrize(("hidden", "difference"), [(1152, HEAD_DIM), (1024, 0), (896, -HEAD_DIM)])
def test_head_width_relative_to_hidden_size_is_kept(hidden: int, difference: int) -> None:
    _, tiny = shrunk("gemma3_text", hidden_size=hidden, num_attention_heads=4, num_key_value_heads=1, head_dim=256)
    assert tiny.hidden_size - 4 * HEAD_DIM == difference


def test_layer_pattern_is_kept_until_every_type_occurs() -> None:
    _, tiny = shrunk("gemma3_text", num_hidden_layers=26)
    assert tiny.layer_types == [*["sliding_attention"] * 5, "full_attention"]
    assert tiny.num_hidden_layers == 6


def test_long_layer_pattern_keeps_the_first_layer_of_each_type() -> None:
    config, tiny = shrunk("qwen2", use_sliding_window=True, max_window_layers=20, num_hidden_layers=24)
    assert config.layer_types.index("sliding_attention") == 20
    assert tiny.layer_types == ["full_attention", "full_attention", "sliding_attention"]
    assert (tiny.max_window_layers, tiny.num_hidden_layers) == (2, 3)
    assert tiny.num_hidden_layers <= MOST_LAYERS


def test_mamba_heads_fit_the_state_and_attention_layers_remain() -> None:
    _, tiny = shrunk("bamba", attn_layer_indices=[9, 18, 27])
    assert tiny.mamba_n_heads * tiny.mamba_d_head == tiny.mamba_expand * tiny.hidden_size
    assert tiny.layers_block_type == ["linear_attention", "linear_attention", "full_attention"]
    _, tiny = shrunk("jamba")
    assert tiny.num_hidden_layers == 8
    assert "full_attention" in tiny.layer_types


def test_mixture_keeps_dense_layers_groups_and_shared_experts() -> None:
    config, tiny = shrunk("deepseek_v3")
    assert tiny.first_k_dense_replace == config.first_k_dense_replace == 3
    assert tiny.num_hidden_layers == 4
    assert (tiny.n_group, tiny.topk_group, tiny.n_routed_experts, tiny.num_experts_per_tok) == (4, 2, 8, 2)
    assert (tiny.n_shared_experts, tiny.norm_topk_prob) == (config.n_shared_experts, config.norm_topk_prob)
    _, all_mixtures = shrunk("deepseek_v3", first_k_dense_replace=0)
    assert (all_mixtures.first_k_dense_replace, all_mixtures.num_hidden_layers) == (0, 2)


def test_scaled_rope_keeps_type_and_scale() -> None:
    longrope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
    _, tiny = shrunk(
        "phi3", hidden_size=3072, num_attention_heads=24, num_key_value_heads=8, partial_rotary_factor=0.75,
        original_max_position_embeddings=4096, max_position_embeddings=131072, rope_parameters=longrope,
    )  # fmt: skip
    assert tiny.rope_parameters["rope_type"] == "longrope"
    assert tiny.rope_parameters["short_factor"] == [1.0] * 12  # pairs of the rotated part of a small head
    assert tiny.original_max_position_embeddings == 512
    llama3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
              "original_max_position_embeddings": 8192}  # fmt: skip
    _, tiny = shrunk("llama", rope_parameters=llama3)
    assert tiny.rope_parameters == llama3 | {"original_max_position_embeddings": 512}


@pytest.mark.parametrize("head_dim", [16, 32, 128])
def test_longrope_factors_keep_their_range_for_any_head_size(head_dim: int) -> None:
    pairs = head_dim // 2
    rope = {
        "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * pairs,
        "long_factor": [1.0 + pair / pairs for pair in range(pairs)],
    }  # fmt: skip
    _, tiny = shrunk(
        "phi3", hidden_size=4 * head_dim, num_attention_heads=4, num_key_value_heads=4,
        original_max_position_embeddings=256, max_position_embeddings=512, rope_parameters=rope,
    )  # fmt: skip
    found = tiny.rope_parameters["long_factor"]
    assert len(found) == len(tiny.rope_parameters["short_factor"]) == HEAD_DIM // 2
    assert found == sorted(found)
    assert (found[0], found[-1]) == (1.0, pytest.approx(2.0, abs=2 / min(pairs, HEAD_DIM // 2)))


def test_tiny_config_does_not_modify_the_original() -> None:
    config = AutoConfig.for_model("gemma3_text")
    before = config.to_dict()
    tiny_config(config)
    assert config.to_dict() == before


def test_rejects_model_too_large_to_shrink(tmp_path: Any) -> None:
    config = tiny_config(AutoConfig.for_model("qwen2"), vocab_size=1_000_000)
    with pytest.raises(ModelError, match=r"a tiny qwen2 would have .* in model.embed_tokens.weight"):
        make_tiny(config, tmp_path / "model")

"""Model families of transformers, each with a tiny random model, and their known problems."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from titan_rl.training.models.shrunken_models import make_tiny, tiny_config

YARN = {"rope_type": "yarn", "rope_theta": 50000.0, "factor": 4.0, "original_max_position_embeddings": 32}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}

FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "qwen2": {},
    "qwen3": {},
    "llama": {},
    "llama, tied": {"tie_word_embeddings": True},
    "llama, linear rope": {"rope_parameters": LINEAR},
    "mistral": {},
    "mistral, YaRN": {"rope_parameters": YARN},
    "ministral3": {},
    "gemma": {},
    "gemma2": {},
    "gemma3_text": {},
    "vaultgemma": {},
    "phi": {},
    "phi3": {},
    "olmo": {},
    "olmo2": {},
    "olmo3": {},
    "smollm3": {},
    "granite": {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.7},
    "glm": {},
    "glm4": {},
    "seed_oss": {},
    "cohere": {},
    "cohere2": {},
    "starcoder2": {},
    "stablelm": {},
    "nemotron": {"num_key_value_heads": 2},
    "hunyuan_v1_dense": {},
    "ernie4_5": {},
    "exaone4": {},
    "arcee": {},
    "helium": {},
    "apertus": {},
    "nanochat": {},
    "gpt2": {},
    "gpt_neox": {},
    "gpt_oss": {},
    "qwen2_moe": {},
    "qwen3_moe": {},
    "mixtral": {},
    "olmoe": {},
    "granitemoe": {},
    "phimoe": {},
    "ernie4_5_moe": {},
    "glm4_moe": {"head_dim": 32},
    "deepseek_v3": {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "minimax_m2": {"head_dim": 32, "rotary_dim": 32, "scoring_func": "sigmoid", "use_routing_bias": True},
    "qwen3_next": {},
    "qwen3_5_text": {},
    "qwen3_5_moe_text": {},
    "olmo_hybrid": {},
    "kimi_linear": {},
    "lfm2": {
        "layer_types": ["conv", "conv", "full_attention"],
        "num_hidden_layers": 3,
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_hidden_layers": 4},
    "mamba": {},
    "mamba2": {"n_groups": 1},
    "mamba2, groups": {},
    "falcon_mamba": {},
    "bamba": {"attn_layer_indices": [1], "num_hidden_layers": 3},
    "falcon_h1": {"lm_head_multiplier": 0.5, "embedding_multiplier": 2.0, "ssm_in_multiplier": 0.7},
    "jamba": {"attn_layer_period": 4, "attn_layer_offset": 2, "num_hidden_layers": 4},
    "granitemoehybrid": {
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_hidden_layers": 3,
        "logits_scaling": 2.0,
    },
    "nemotron_h": {},
    "nemotron_h, dense": {"layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"]},
}
"""Extra fields of a tiny config, by test name: the model_type, and a variant after a comma."""

MOST_DIFFERENT = ("qwen2", "gemma2", "gemma3_text", "gpt_oss", "cohere2", "glm4_moe")
"""Families included in every test run; `make test-models` includes all."""

RESULTS = Path(__file__).with_name("results.json")
"""Results of the last `make test-models`: "yes", "no", or "-" where there is nothing to check."""

ALL = bool(os.environ.get("TITAN_RL_TEST_MODELS"))
SELECTED = tuple(FAMILIES) if ALL else MOST_DIFFERENT

ENGINE_PROBLEMS: Mapping[str, str] = {
    "apertus": "vLLM computes the scales of its activation in bfloat16; logprobs of an export differ by 0.0014",
    "gpt_oss": "vLLM has no kernel on a CPU for its experts ([vllm#23934](https://github.com/vllm-project/vllm/issues/23934))",
    "deepseek_v3": "vLLM's latent attention has no kernel for heads as small as the test's "
    "([vllm#22193](https://github.com/vllm-project/vllm/issues/22193))",
    "minimax_m2": "vLLM's experts on a CPU support only softmax scores",
    "phimoe": "vLLM does not know the architecture by the name that transformers gives it, and its own backend for "
    "transformers' code fails in the router",
    "qwen3_next": "vLLM's gated delta rule computes only in bfloat16 on a CPU, with heads of 128, where runs work",
    "qwen3_5_text": "vLLM's module of this family imports torchvision, without which these tests run",
    "qwen3_5_moe_text": "vLLM's module of this family imports torchvision, without which these tests run",
    "olmo_hybrid": "vLLM's gated delta rule for this family needs a Triton that compiles for CPUs",
    "kimi_linear": "vLLM's delta attention imports CUTLASS, which is for CUDA only",
    "mamba": "vLLM has no scan of Mamba's first version for CPUs",
    "falcon_mamba": "vLLM has no scan of Mamba's first version for CPUs",
    "jamba": "vLLM has no scan of Mamba's first version for CPUs",
    "mamba2, groups": "vLLM normalizes each group of channels, and transformers all of them together",
    "bamba": "vLLM has no model of its own for it, and its backend for transformers' code has no recurrent layers",
    "nemotron_h": "vLLM's experts on a CPU have only gated activations",
    "nemotron_h, dense": "logprobs of vLLM's Mamba layers differ by 0.0002",
}
"""Families that the vLLM engine does not run correctly on a CPU, with the reason."""

ON_ONE_RANK = "its recurrent layers need all tokens of a document on one rank"
"""Reason why ranks do not share the rows of families in `RECURRENT`."""

REPLAY_PROBLEMS: Mapping[str, str] = {"phimoe": "its router does not choose by top-k"}
"""Mixtures that reject replayed experts, with the reason."""

SHARED_BY_RANKS = tuple(FAMILIES) if ALL else ("gemma2", "gpt_oss")
"""Families tested with two ranks that share rows or experts."""

ENGINES = tuple(FAMILIES) if ALL else ("qwen2", "gemma3_text")
"""Families tested in the vLLM engine."""


ADAPTED_TARGETS: Mapping[str, tuple[str, ...]] = {"glm4": ("q_proj", "k_proj", "v_proj", "o_proj", "down_proj")}
"""Adapter targets of families with layers that cannot be adapted."""


def model_type(name: str) -> str:
    return name.partition(",")[0]


def make_family(name: str, folder: Path) -> Path:
    """Write a tiny random model of a family."""
    config = tiny_config(AutoConfig.for_model(model_type(name)), **FAMILIES[name])
    make_tiny(config, folder)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


WRONG_IN_THE_ENGINE = ("apertus",)
"""Families whose published weights the vLLM engine computes differently, without a message."""

"""Settings of docs/how_to/long_rows.md, for the model that it names and for a tiny one."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchtitan", reason="needs the cpu or gpu extra")

import torch
from e2e.sharded_steps import long_row
from e2e.tiny_policy import make_tiny_qwen3, sequences, transformers_logprobs
from e2e.warm import run_world
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from titan_rl.config.model_folder import check_model_folder
from titan_rl.config.sections import GenerationConfig
from titan_rl.core.errors import ConfigError
from titan_rl.training.settings import ModelConfig

PAGE = (Path(__file__).parents[2] / "docs" / "how_to" / "long_rows.md").read_text()
LENGTH = 512  # row length of the tiny model, in place of 131,072
QWEN3_8B = {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
}


def block(language: str) -> str:
    """The page's first block of code in a language."""
    found = re.search(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    assert found
    return found[1]


def test_long_rows_settings_require_the_documented_rope_config(tmp_path: Path) -> None:
    settings: dict[str, Any] = tomllib.loads(block("toml"))
    model = ModelConfig(**{**settings["model"], "path": str(tmp_path)})
    generation = GenerationConfig(**settings["generation"])
    save_file({"none": torch.zeros(1)}, tmp_path / "model.safetensors")
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    with pytest.raises(ConfigError, match=r"131072 is more than the model's 40960 positions; .*long_rows\.md"):
        check_model_folder(model, generation, [tmp_path])
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B | json.loads(block("json"))))
    check_model_folder(model, generation, [tmp_path])


def test_context_parallel_long_row_matches_transformers(tmp_path: Path) -> None:
    settings: dict[str, Any] = tomllib.loads(block("toml"))
    rope = json.loads(block("json"))["rope_parameters"]
    rope["original_max_position_embeddings"] = LENGTH // int(rope["factor"])
    folder = make_tiny_qwen3(tmp_path / "model", rope=rope)
    training = settings["training"] | {"context_parallel": 2, "row_tokens": LENGTH}
    model = settings["model"] | {"path": str(folder), "max_context": LENGTH}
    (sequence,) = sequences(LENGTH)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).float()
    expected = transformers_logprobs(reference, sequence)
    for scores, metrics in run_world(long_row, 2, model=model, training=training):
        torch.testing.assert_close(torch.tensor(scores), expected, rtol=0, atol=1e-4)
        assert metrics["num_tokens"] == LENGTH // 2
        assert metrics["on_policy_logprob_diff_mean"] < 0.1
        assert metrics["reference_kl"] == pytest.approx(0, abs=1e-6)

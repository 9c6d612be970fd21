"""`titan-rl doctor --model` with the real stack."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torchtitan", reason="needs the cpu or gpu extra")
pytest.importorskip("vllm", reason="needs the cpu or gpu extra")

from titan_rl.cli.main import main

QWEN2_5_0_5B = {
    "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151643,
    "hidden_act": "silu", "hidden_size": 896, "initializer_range": 0.02, "intermediate_size": 4864,
    "max_position_embeddings": 32768, "max_window_layers": 24, "model_type": "qwen2", "num_attention_heads": 14,
    "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
    "sliding_window": 32768, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "use_sliding_window": False,
    "vocab_size": 151936,
}  # fmt: skip


def test_doctor_checks_a_published_config_in_trainer_and_engine(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN2_5_0_5B))
    code = main(["doctor", "--model", str(tmp_path), "--json"])
    printed = capfd.readouterr()
    found = {line["name"]: line for line in map(json.loads, printed.out.splitlines())}
    assert code == 0, printed
    assert list(found) == ["logprobs", "leakage", "gradients", "engine", "sampling", "hot swaps"]
    assert all(line["difference"] <= line["tolerance"] for line in found.values())
    assert {name for name, line in found.items() if not line["difference"]} <= {"leakage"}
    assert "yes, a run can train 'qwen2'" in printed.err

"""A random Qwen3 in a Hugging Face folder, small enough to build in a test."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM


def make_tiny_qwen3(
    folder: Path, *, tied: bool = False, seed: int = 0, vocab_size: int = 128, num_layers: int = 2
) -> Path:
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=1024,
        tie_word_embeddings=tied,
        rope_parameters={"rope_type": "default", "rope_theta": 50000.0},
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config).float()
        # Random weights give nearly uniform distributions; larger ones make every test of logits sharper.
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 2:
                    parameter.mul_(4)
    model.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder

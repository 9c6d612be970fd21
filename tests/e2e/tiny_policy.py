"""Tiny random models for tests, with trainers, samples and reference logprobs by transformers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from titan_rl.training.data.sample import TrainingSample
from titan_rl.training.settings import ModelConfig, TrainingConfig
from titan_rl.training.trainer import TrainerCore

YARN = {"rope_type": "yarn", "rope_theta": 50000.0, "factor": 8.0, "original_max_position_embeddings": 128}
"""Rope settings that extend a context of 128 to 1024 positions."""


def make_tiny_qwen3(
    folder: Path,
    *,
    tied: bool = False,
    seed: int = 0,
    vocab_size: int = 128,
    num_layers: int = 2,
    rope: dict[str, Any] | None = None,
    max_positions: int = 1024,
) -> Path:
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=max_positions,
        tie_word_embeddings=tied,
        rope_parameters=rope or {"rope_type": "default", "rope_theta": 50000.0},
    )
    return _save(Qwen3ForCausalLM, config, folder, seed)


def make_tiny_llama3(folder: Path, *, tied: bool = False, rope: dict[str, Any] | None = None) -> Path:
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=tied,
        rope_parameters=rope
        or {
            "rope_type": "llama3",
            "rope_theta": 50000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        },
    )
    return _save(LlamaForCausalLM, config, folder, seed=0)


def make_tiny_moe(folder: Path) -> Path:
    config = Qwen3MoeConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=48,
        num_experts=6,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 50000.0},
    )
    return _save(Qwen3MoeForCausalLM, config, folder, seed=0)


def _save(model_class: type[Any], config: Any, folder: Path, seed: int) -> Path:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class(config).float()
        # Random weights give nearly uniform distributions; larger ones make every test of logits sharper.
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim >= 2:
                    parameter.mul_(4)
    model.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


def make_trainer(folder: Path, *, num_threads: int = 1, **training: Any) -> TrainerCore:
    config = TrainingConfig(**{"steps": 10, **training})
    return TrainerCore(ModelConfig(path=str(folder)), config, seed=0, num_threads=num_threads)


def sequences(*lengths: int) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(128) for _ in range(length)] for length in lengths]


def on_policy_samples(
    trainer: TrainerCore, *lengths: int, temperature: float = 1.0, at_once: bool = False
) -> list[TrainingSample]:
    """On-policy samples whose completion is the second half of each sequence. Advantages alternate in sign.

    Args:
        at_once: Score all sequences in one forward pass, which is much faster on several ranks.
    """
    samples: list[TrainingSample] = []
    drawn = sequences(*lengths)
    scored = trainer.score(drawn) if at_once else [trainer.score([sequence])[0] for sequence in drawn]
    for index, (sequence, scores) in enumerate(zip(drawn, scored, strict=True)):
        mask = [t >= len(sequence) // 2 for t in range(len(sequence))]
        logprobs = [0.0, *scores]
        samples.append(
            TrainingSample(
                group_id="g",
                rollout_id=f"g/{index}",
                token_ids=sequence,
                loss_mask=mask,
                behaviour_logprobs=[p if trained else 0.0 for p, trained in zip(logprobs, mask, strict=True)],
                advantages=[(-1.0) ** index if trained else 0.0 for trained in mask],
                versions=[trainer.version if trained else -1 for trained in mask],
                temperature=temperature,
            )
        )
    return samples


def weights(trainer: TrainerCore) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.named_tensors()}


def transformers_logprobs(model: Any, sequence: Sequence[int], temperature: float = 1.0) -> torch.Tensor:
    token_ids = torch.tensor([sequence])
    with torch.no_grad():
        logprobs = (model(token_ids).logits[0] / temperature).log_softmax(-1)
    return logprobs[:-1].gather(-1, token_ids[0, 1:, None])[:, 0]

"""Trainers of a family, and the steps that each rank of a test makes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from e2e.tiny_policy import on_policy_samples

from titan_rl.training.settings import ModelConfig, TrainingConfig
from titan_rl.training.trainer import TrainerCore


def make(folder: Path, implementation: Any = "transformers", num_threads: int = 1, **training: Any) -> TrainerCore:
    settings = TrainingConfig(**{"steps": 10, "lr": 1e-3, "row_tokens": 128, **training})
    return TrainerCore(
        ModelConfig(path=str(folder), max_context=128, implementation=implementation),
        settings,
        seed=0,
        num_threads=num_threads,
    )


def two_steps(folder: Path, out: Path, **settings: Any) -> list[float]:
    """Losses and gradient norms of two steps with a reference model, whose result is exported to `out`."""
    trainer = make(folder, **{"lr": 1e-4, "kl_coef": 0.1, "activation_checkpointing": "full", **settings})
    samples = on_policy_samples(trainer, 50, 20, 33, 41)
    found: list[float] = []
    for _ in range(2):
        metrics = trainer.step(samples).metrics
        found += [metrics["loss"], metrics["grad_norm"]]
    trainer.export_hf(out)
    return found

"""Trainers of a family, and the functions that each rank of a test runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from e2e.tiny_policy import on_policy_samples
from safetensors.torch import load_file

from titan_rl.training.family_check import draw_sequences
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


def scores_and_gradient(
    folder: Path, out: Path, implementation: Any = "transformers", **settings: Any
) -> list[list[float]]:
    """Score sequences, make a step of plain gradient descent and export the weights to `out`. Return the logprobs."""
    trainer = make(
        folder,
        implementation,
        **{"optimizer": "sgd", "betas": (0.0, 0.95), "lr": 1.0, "max_grad_norm": 1e6, **settings},
    )
    scores = trainer.score(draw_sequences(40, 17, 90, 33))
    trainer.step(on_policy_samples(trainer, 50, 20, 33, 90, 41))
    trainer.export_hf(out)
    return scores


def gradient_error(folder: Path, ours: Path, theirs: Path) -> float:
    """Largest relative difference between the gradients of two exports of `scores_and_gradient`. For gradients that are
    zero up to rounding, the absolute difference."""
    begin, mine, other = ({k: v for f in sorted(each.glob("*.safetensors")) for k, v in load_file(f).items()}
                          for each in (folder, ours, theirs))  # fmt: skip
    assert mine.keys() == other.keys()
    return max(
        float((other[key] - tensor).norm()) / max(float((tensor - begin[key]).norm()), 1e-3)
        for key, tensor in mine.items()
    )


def two_steps(folder: Path, out: Path, **settings: Any) -> list[float]:
    """Make two steps with a reference model and export to `out`. Return the losses and gradient norms."""
    trainer = make(folder, **{"lr": 1e-4, "kl_coef": 0.1, "activation_checkpointing": "full", **settings})
    samples = on_policy_samples(trainer, 50, 20, 33, 41)
    found: list[float] = []
    for _ in range(2):
        metrics = trainer.step(samples).metrics
        found += [metrics["loss"], metrics["grad_norm"]]
    trainer.export_hf(out)
    return found

"""What each rank of a trainer under test does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from e2e.tiny_policy import on_policy_samples

from titan_rl.training.settings import CorrectionConfig, ModelConfig, TrainingConfig
from titan_rl.training.trainer import TrainerCore

LENGTHS = (50, 20, 33, 41, 64, 12, 27)


def three_steps(folder: Path, out: Path, *, resume: Path | None = None, **training: Any) -> list[dict[str, float]]:
    """Three steps, a checkpoint and an export in `out`, and with `resume` one step more from that checkpoint."""
    settings = TrainingConfig(**{"steps": 10, "lr": 1e-4, "row_tokens": 64, "rows_per_micro_batch": 2, **training})
    correction = CorrectionConfig(proximal="recomputed", weight="token", cap=2.0)
    trainer = TrainerCore(ModelConfig(path=str(folder)), settings, correction, seed=0)
    samples = on_policy_samples(trainer, *LENGTHS)
    metrics = [trainer.step(samples).metrics for _ in range(3)]
    trainer.save(out / "checkpoint")
    trainer.export_hf(out / "export")
    if resume is not None:
        trainer.load(resume)
        metrics.append(trainer.step(samples).metrics)
    return metrics

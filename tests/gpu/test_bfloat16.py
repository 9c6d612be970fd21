"""bfloat16 training and generation. Skipped without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torchtitan", reason="needs the cpu or gpu extra")

import torch
from e2e.tiny_policy import make_tiny_qwen3, on_policy_samples, sequences

from titan_rl.generation.engine import EngineSpec
from titan_rl.generation.vllm_engine import VLLMEngine
from titan_rl.training.settings import ModelConfig, TrainingConfig
from titan_rl.training.trainer import TrainerCore

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU; the CPU path has its own tests")


def test_bfloat16_trainer_learns_and_vllm_agrees(tmp_path: Path) -> None:
    folder = make_tiny_qwen3(tmp_path / "model")
    trainer = TrainerCore(ModelConfig(path=str(folder), dtype="bfloat16"), TrainingConfig(steps=20, lr=1e-3), seed=0)
    samples = on_policy_samples(trainer, 64, 48, 80)
    losses = [trainer.step(samples).metrics["loss"] for _ in range(20)]
    assert losses[-1] < losses[0]
    tensors = list(trainer.named_tensors())
    assert {tensor.device.type for _, tensor in tensors} == {"cuda"}
    assert {tensor.dtype for _, tensor in tensors} == {torch.bfloat16}
    engine = VLLMEngine(EngineSpec(str(folder), dtype="bfloat16", max_context=256, kv_cache_gib=1.0))
    engine.load_state_dict(tensors, 1)
    for mine, theirs in zip(trainer.score(sequences(40, 64)), engine.score(sequences(40, 64)), strict=True):
        difference = (torch.tensor(mine) - torch.tensor(theirs)).abs()
        assert difference.mean() < 0.1
    engine.close()

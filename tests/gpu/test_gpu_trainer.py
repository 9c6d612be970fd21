"""Trainer on a GPU, with torchtitan. Skipped without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torchtitan", reason="needs the cpu or gpu extra")

import torch
from e2e.tiny_policy import make_tiny_qwen3, on_policy_samples, sequences
from transformers import AutoModelForCausalLM

from titan_rl.training.settings import ModelConfig, TrainingConfig
from titan_rl.training.trainer import TrainerCore

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU; the CPU path has its own tests")


def test_bfloat16_trainer_learns_and_scores_its_published_weights(tmp_path: Path) -> None:
    folder = make_tiny_qwen3(tmp_path / "model")
    trainer = TrainerCore(ModelConfig(path=str(folder), dtype="bfloat16"), TrainingConfig(steps=20, lr=1e-3), seed=0)
    samples = on_policy_samples(trainer, 64, 48, 80)
    losses = [trainer.step(samples).metrics["loss"] for _ in range(10)]
    assert losses[-1] < losses[0]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.load_state_dict({name: tensor.cpu() for name, tensor in trainer.named_tensors()}, strict=False)
    (ids,) = sequences(60)
    with torch.no_grad():
        expected = (
            model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1).gather(-1, torch.tensor(ids)[1:, None])[:, 0]
        )
    torch.testing.assert_close(torch.tensor(trainer.score_published([ids])[0]), expected, rtol=0, atol=5e-3)


def test_offloading_frees_gpu_memory_and_changes_no_step(tmp_path: Path) -> None:
    folder = make_tiny_qwen3(tmp_path / "model", num_layers=8)
    found: list[float] = []
    before: list[int] = []
    for offload in (False, True):
        settings = TrainingConfig(
            steps=20,
            kl_coef=0.1,
            activation_checkpointing="full",
            offload=("activations", "reference") if offload else (),
        )
        held = torch.cuda.memory_allocated()
        trainer = TrainerCore(ModelConfig(path=str(folder)), settings, seed=0)
        before.append(torch.cuda.memory_allocated() - held)
        samples = on_policy_samples(trainer, 64, 48, 80)
        found.append([trainer.step(samples).metrics["loss"] for _ in range(3)][-1])
        weights = sum(tensor.nbytes for _, tensor in trainer.named_tensors())
        del trainer
    assert found[1] == pytest.approx(found[0], abs=1e-5)
    assert before[0] - before[1] > 0.9 * weights

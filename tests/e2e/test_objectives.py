"""Losses, corrections, minibatches and the reference model in the real trainer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torchtitan", reason="needs the cpu or gpu extra")

import torch
from depth import in_depth
from e2e.tiny_policy import make_tiny_qwen3, make_trainer, on_policy_samples, weights

from titan_rl.training.data.sample import TrainingSample
from titan_rl.training.losses import BY_NAME
from titan_rl.training.settings import CorrectionConfig, ModelConfig, TrainingConfig
from titan_rl.training.trainer import TrainerCore

LENGTHS = (40, 33, 20, 27)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_qwen3(tmp_path_factory.mktemp("model"))


def stale(samples: list[TrainingSample], by: float) -> list[TrainingSample]:
    """The same samples with lower behaviour logprobs."""
    return [replace(s, behaviour_logprobs=[p - by for p in s.behaviour_logprobs]) for s in samples]


def in_groups(samples: list[TrainingSample]) -> list[TrainingSample]:
    return [replace(sample, group_id=f"g{index // 2}") for index, sample in enumerate(samples)]


@pytest.mark.parametrize(
    ("loss", "proximal"),
    [
        *[(loss, "behaviour") for loss in BY_NAME],
        ("grpo", "recomputed"),
        ("grpo", "interpolated"),
        *[
            pytest.param(loss, proximal, marks=in_depth)
            for loss in BY_NAME
            if loss != "grpo"
            for proximal in ("recomputed", "interpolated")
        ],
    ],
)
def test_on_policy_ratios_are_one_without_clipping_or_masking(folder: Path, loss: str, proximal: str) -> None:
    correction = CorrectionConfig(proximal=proximal)  # pyright: ignore[reportArgumentType]
    if proximal != "behaviour":
        correction = correction.model_copy(update={"weight": "token", "mask": "geometric", "bounds": (0.99, 1.01)})
    trainer = TrainerCore(ModelConfig(path=str(folder)), TrainingConfig(steps=2, loss=loss), correction, seed=0)
    metrics = trainer.step(on_policy_samples(trainer, *LENGTHS)).metrics
    assert metrics["ratio_mean"] == pytest.approx(1, abs=1e-5)
    assert metrics["ratio_max"] == pytest.approx(1, abs=1e-4)
    assert metrics["clip_fraction"] == 0 or loss == "cispo"  # cispo counts a weight that differs from 1 by an ulp
    assert metrics["correction_masked_fraction"] == 0
    assert metrics["correction_weight_max"] == pytest.approx(1, abs=1e-4)


def test_reward_losses_have_equal_gradients_on_policy(folder: Path) -> None:
    """If all ratios are 1, each loss gives the policy gradient. The negative log-likelihood ignores rewards."""
    norms: list[float] = []
    for loss in set(BY_NAME) - {"nll"}:
        trainer = make_trainer(folder, loss=loss, average="sequence")
        norms.append(trainer.step(on_policy_samples(trainer, *LENGTHS)).metrics["grad_norm"])
    assert norms == pytest.approx([norms[0]] * len(norms), rel=1e-4)


def test_recomputed_proximal_removes_staleness_from_the_ratio(folder: Path) -> None:
    bypass = make_trainer(folder)
    metrics = bypass.step(stale(on_policy_samples(bypass, *LENGTHS), by=1.0)).metrics
    assert metrics["clip_fraction"] > 0.3
    correction = CorrectionConfig(proximal="recomputed", weight="token", cap=2.0)
    decoupled = TrainerCore(ModelConfig(path=str(folder)), TrainingConfig(steps=2), correction, seed=0)
    metrics = decoupled.step(stale(on_policy_samples(decoupled, *LENGTHS), by=1.0)).metrics
    assert metrics["clip_fraction"] == 0
    assert metrics["correction_weight_mean"] == pytest.approx(2.0)  # exp(1) is capped


def test_minibatches_are_optimizer_steps_over_whole_groups(folder: Path) -> None:
    trainer, by_hand = make_trainer(folder, minibatches=2), make_trainer(folder)
    samples = in_groups(on_policy_samples(trainer, *LENGTHS))
    result = trainer.step(samples)
    assert result.version == 1
    assert result.metrics["num_samples"] == 4
    assert result.metrics["ratio_max"] > 1.0001  # the first half has already changed the weights
    by_hand.step(samples[:2])
    by_hand.step(samples[2:])
    expected = weights(by_hand)
    for name, tensor in weights(trainer).items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-6)


def test_later_minibatches_take_ratios_against_the_initial_weights(folder: Path) -> None:
    correction = CorrectionConfig(proximal="recomputed")
    training = TrainingConfig(steps=2, minibatches=2, lr=1e-2)
    trainer = TrainerCore(ModelConfig(path=str(folder)), training, correction, seed=0)
    samples = in_groups(on_policy_samples(trainer, *LENGTHS))
    assert trainer.step(stale(samples, by=5.0)).metrics["clip_fraction"] > 0.05


def test_kl_penalty_limits_policy_change(folder: Path) -> None:
    moved: list[float] = []
    for kl_coef in (0.0, 10.0):
        trainer = make_trainer(folder, kl_coef=kl_coef, lr=1e-3)
        samples = on_policy_samples(trainer, *LENGTHS)
        before = trainer.score([samples[0].token_ids])[0]
        metrics = [trainer.step(samples).metrics for _ in range(6)]
        after = trainer.score([samples[0].token_ids])[0]
        moved.append(sum(abs(a - b) for a, b in zip(after, before, strict=True)))
        assert metrics[0]["reference_kl"] == pytest.approx(0, abs=1e-9)
        assert (metrics[-1]["reference_kl"] > 0) == (kl_coef > 0)
    assert moved[1] < 0.7 * moved[0]

"""Updates of the reference model to the policy, `training.reference_interval`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchtitan", reason="needs the cpu or gpu extra")

import torch
from e2e.tiny_policy import make_tiny_qwen3, make_trainer, on_policy_samples, weights

from titan_rl.training.trainer import TrainerCore

LENGTHS = (24, 33, 8, 16)


@pytest.fixture(scope="module", params=["untied", "tied"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_qwen3(tmp_path_factory.mktemp(request.param), tied=request.param == "tied")


def trained(folder: Path, **settings: Any) -> TrainerCore:
    return make_trainer(folder, kl_coef=0.5, kl="k2", lr=1e-3, **settings)


def test_reference_is_updated_at_each_interval(folder: Path):
    trainer = trained(folder, reference_interval=2)
    samples = on_policy_samples(trainer, *LENGTHS)

    kls = [trainer.step(samples).metrics["reference_kl"] for _ in range(5)]

    assert [kl == pytest.approx(0, abs=1e-9) for kl in kls] == [True, False, True, False, True]


def test_reference_stays_initial_without_an_interval(folder: Path):
    trainer = trained(folder)
    samples = on_policy_samples(trainer, *LENGTHS)

    kls = [trainer.step(samples).metrics["reference_kl"] for _ in range(5)]

    assert all(kl > 1e-9 for kl in kls[1:])


def test_resumed_trainer_restores_the_reference(folder: Path, tmp_path: Path):
    straight = trained(folder, reference_interval=2)
    samples = on_policy_samples(straight, *LENGTHS)
    for _ in range(3):  # the reference has version 2
        straight.step(samples)
    straight.save(tmp_path / "checkpoint")
    resumed = trained(folder, reference_interval=2)
    resumed.load(tmp_path / "checkpoint")

    expected = [straight.step(samples).metrics for _ in range(3)]
    got = [resumed.step(samples).metrics for _ in range(3)]

    assert [step["reference_kl"] for step in got] == [step["reference_kl"] for step in expected]
    ours, theirs = weights(resumed), weights(straight)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)

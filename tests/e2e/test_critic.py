"""Critics: learning, advantages, checkpoints and several ranks."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchtitan", reason="needs the cpu or gpu extra")

import torch
from depth import in_depth
from e2e.sharded_steps import steps_with_a_critic, with_rewards
from e2e.tiny_policy import make_tiny_qwen3, make_trainer, on_policy_samples, weights
from e2e.warm import run_world
from safetensors import safe_open
from safetensors.torch import load_file

from titan_rl.core.errors import CheckpointError, TrainingError
from titan_rl.training.data.sample import TrainingSample
from titan_rl.training.export import export_checkpoint

LENGTHS = (24, 33, 8, 16)
KINDS = ("head", "model")


@pytest.fixture(scope="module", params=["untied", pytest.param("tied", marks=in_depth)])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_qwen3(tmp_path_factory.mktemp(request.param), tied=request.param == "tied")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("over", ["token", "turn"])
def test_critic_learns_to_explain_rewards(folder: Path, kind: str, over: str):
    settings = {"algorithm": "ppo", "critic": kind, "gae_over": over, "critic_lr": 1e-2, "critic_epochs": 4}
    trainer = make_trainer(folder, **settings, gae=(1.0, 1.0), lr=1e-6)
    samples = with_rewards(on_policy_samples(trainer, *LENGTHS))

    metrics = [trainer.step(samples).metrics for _ in range(12)]

    assert metrics[0]["explained_variance"] == pytest.approx(0, abs=1e-6)
    assert metrics[0]["value_loss"] == pytest.approx(0.25, abs=0.2)
    assert metrics[-1]["explained_variance"] > 0.8
    assert metrics[-1]["value_loss"] < 0.1 * metrics[0]["value_loss"]


@pytest.mark.parametrize("kind", KINDS)
def test_first_step_matches_standardized_rewards(folder: Path, kind: str):
    critic = make_trainer(folder, algorithm="ppo", critic=kind, gae=(1.0, 1.0))
    plain = make_trainer(folder, algorithm="ppo", critic="none")
    samples = on_policy_samples(critic, *LENGTHS)
    counts = [sum(sample.loss_mask) for sample in samples]
    mean = sum(count for i, count in enumerate(counts) if i % 2 == 0) / sum(counts)
    std = math.sqrt(mean * (1 - mean))
    given = [
        replace(sample, advantages=[((i + 1) % 2 - mean) / (std + 1e-6) if t else 0.0 for t in sample.loss_mask])
        for i, sample in enumerate(samples)
    ]

    found, expected = critic.step(with_rewards(samples)).metrics, plain.step(given).metrics

    assert found["loss"] == pytest.approx(expected["loss"], abs=1e-6)
    assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
    for name, tensor in weights(critic).items():
        assert torch.allclose(tensor, weights(plain)[name], atol=1e-5), name


def test_advantages_of_a_teacher_are_added_to_those_of_the_critic(folder: Path):
    settings = {"algorithm": "ppo", "critic": "head", "gae": (1.0, 1.0)}
    samples = with_rewards(on_policy_samples(make_trainer(folder, **settings), *LENGTHS))
    taught = [replace(sample, advantages=[0.5 * trained for trained in sample.loss_mask]) for sample in samples]

    alone, both = (make_trainer(folder, **settings).step(each).metrics for each in (samples, taught))

    # On the policy the ratio is 1, so that the loss is minus the mean advantage.
    assert both["loss"] == pytest.approx(alone["loss"] - 0.5, abs=1e-5)


def test_truncated_rollout_bootstraps_from_its_last_value(folder: Path):
    settings = {"algorithm": "ppo", "critic": "head", "critic_epochs": 8, "gae": (1.0, 1.0), "lr": 1e-6}
    trainer = make_trainer(folder, **settings)
    (sample,) = on_policy_samples(trainer, 24)
    (ended,) = with_rewards([sample])
    for _ in range(60):
        trainer.step([ended])  # every state has the value 1
    assert ended.episode is not None
    nothing = replace(ended.episode, rewards=[0.0] * 24)

    truncated = trainer.step([replace(sample, episode=replace(nothing, is_truncated=True))]).metrics
    final = trainer.step([replace(sample, episode=nothing)]).metrics

    assert truncated["value_loss"] == pytest.approx(0, abs=0.02)
    assert final["value_loss"] == pytest.approx(0.5, abs=0.1)


def test_sample_before_an_edited_history_bootstraps_from_the_last_value_of_its_rollout(folder: Path):
    settings = {"algorithm": "ppo", "critic": "model", "critic_lr": 1e-2, "critic_epochs": 8, "gae": (1.0, 1.0)}
    trainer = make_trainer(folder, **settings, lr=1e-6)
    good, bad = with_rewards(on_policy_samples(trainer, 24, 33))
    for _ in range(20):
        trainer.step([good, bad])  # the states of one have the value 1, and of the other 0
    assert good.episode is not None
    assert bad.episode is not None
    before = replace(good.episode, rewards=[0.0] * 24, is_truncated=True, ends_rollout=False)
    last = replace(bad, episode=replace(bad.episode, is_truncated=True))

    def value_loss(first: TrainingSample) -> float:
        return trainer.step([first, last]).metrics["value_loss"]

    alone = value_loss(replace(good, episode=replace(before, ends_rollout=True)))
    followed = value_loss(replace(good, rollout_id=bad.rollout_id, episode=before))

    assert alone == pytest.approx(0, abs=0.02)
    num_first, num_last = sum(good.loss_mask), sum(bad.loss_mask)
    assert followed == pytest.approx(0.5 * num_first / (num_first + num_last), abs=0.05)


@pytest.mark.parametrize("folder", ["untied", "tied"], indirect=True)
@pytest.mark.parametrize("kind", KINDS)
def test_critic_resumes_bitwise_identically_and_is_not_exported(folder: Path, tmp_path: Path, kind: str):
    settings = {"algorithm": "ppo", "critic": kind, "minibatches": 2, "critic_epochs": 2, "kl_coef": 0.0}
    trainer = make_trainer(folder, **settings)
    samples = with_rewards(on_policy_samples(trainer, *LENGTHS))
    for _ in range(2):
        trainer.step(samples)
    trainer.save(tmp_path / "step-000002")
    expected = [trainer.step(samples) for _ in range(2)]

    resumed = make_trainer(folder, **settings)
    resumed.load(tmp_path / "step-000002")
    assert [resumed.step(samples) for _ in range(2)] == expected
    reference = weights(trainer)
    assert all(torch.equal(tensor, reference[name]) for name, tensor in resumed.named_tensors())
    with safe_open(tmp_path / "step-000002" / "rank-0.safetensors", framework="pt") as file:
        names = list(file.keys())
    assert any(name.startswith(f"critic_{'trunk' if kind == 'model' else 'head'}/model/") for name in names)

    export_checkpoint(folder, tmp_path / "step-000002", tmp_path / "export")
    original = load_file(folder / "model.safetensors")
    assert load_file(tmp_path / "export" / "model.safetensors").keys() == original.keys()
    assert {name for name, _ in trainer.held_slices()} == original.keys()
    with pytest.raises(CheckpointError, match="critic"):
        make_trainer(folder).load(tmp_path / "step-000002")


def test_rejects_samples_without_rewards(folder: Path):
    trainer = make_trainer(folder, algorithm="ppo")
    with pytest.raises(TrainingError, match="have no rewards"):
        trainer.step(on_policy_samples(trainer, *LENGTHS))


ON_RANKS = [
    ("untied", {"data_parallel": 2}, "model", True),
    ("untied", {"data_parallel": 2}, "head", True),
    ("untied", {"context_parallel": 2}, "model", True),
    ("untied", {"tensor_parallel": 2}, "model", False),
    ("tied", {"data_parallel": 2}, "model", False),
    ("tied", {"data_parallel": 2}, "head", False),
    ("tied", {"context_parallel": 2}, "model", False),
    ("tied", {"tensor_parallel": 2}, "model", True),
]


@pytest.mark.parametrize(
    ("folder", "layout", "kind"),
    [pytest.param(*variant, marks=() if always else in_depth) for *variant, always in ON_RANKS],
    indirect=["folder"],
)
def test_two_ranks_match_one_rank(folder: Path, tmp_path: Path, layout: dict[str, Any], kind: str):
    settings = {"algorithm": "ppo", "critic": kind, "critic_epochs": 2, "critic_lr": 1e-2}
    alone = steps_with_a_critic(folder, tmp_path / "one", **settings)
    ranks = run_world(steps_with_a_critic, 2, folder=folder, out=tmp_path / "two", **settings, **layout)

    for metrics in ranks:
        for found, expected in zip(metrics, alone, strict=True):
            for name in ("loss", "grad_norm", "value_loss", "explained_variance", "num_tokens"):
                assert math.isclose(found[name], expected[name], rel_tol=5e-4, abs_tol=5e-6), name
    state = json.loads((tmp_path / "two" / "checkpoint" / "state.json").read_text())
    assert state["version"] == 3
    one = make_trainer(folder, **settings)
    one.load(tmp_path / "two" / "checkpoint")
    expected = load_file(tmp_path / "one" / "export" / "model.safetensors")
    for name, tensor in weights(one).items():
        assert torch.allclose(tensor, expected[name], atol=1e-4), name


@pytest.mark.parametrize("extra", [{"adapter": {"rank": 4}}, {"optimizer": "muon"}], ids=["adapter", "muon"])
def test_critic_supports_adapters_and_muon(folder: Path, tmp_path: Path, extra: dict[str, Any]):
    trainer = make_trainer(folder, algorithm="ppo", **extra)
    samples = with_rewards(on_policy_samples(trainer, *LENGTHS))
    losses = [trainer.step(samples).metrics["value_loss"] for _ in range(3)]
    assert losses == sorted(losses, reverse=True)
    trainer.save(tmp_path / "step-000003")
    expected = trainer.step(samples)

    resumed = make_trainer(folder, algorithm="ppo", **extra)
    resumed.load(tmp_path / "step-000003")
    assert resumed.step(samples) == expected


def test_step_with_nonfinite_values_is_skipped(folder: Path):
    trainer = make_trainer(folder, algorithm="ppo")
    samples = with_rewards(on_policy_samples(trainer, *LENGTHS))
    before = weights(trainer)
    assert samples[0].episode is not None
    endless = replace(samples[0].episode, rewards=[0.0] * (LENGTHS[0] - 1) + [1e30])

    result = trainer.step([replace(samples[0], episode=endless), *samples[1:]], skip=True)

    (part,) = result.skipped
    assert "the critic has loss" in part.reason
    assert sorted(part.rollout_ids) == ["g/0", "g/1", "g/2", "g/3"]
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.named_tensors())
    assert trainer.step(samples).skipped == ()

"""Model families in the trainer: results match transformers, packed or not, on one rank or two, and after a resume."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchtitan", reason="needs the cpu or gpu extra")

import torch
from e2e.tiny_policy import on_policy_samples, weights
from e2e.warm import run_world
from models.families import FAMILIES, REPLAY_PROBLEMS, SHARED_BY_RANKS, make_family, model_type
from models.steps import gradient_error, make, scores_and_gradient, two_steps
from safetensors.torch import load_file

from titan_rl.core.errors import ModelError
from titan_rl.training.device import local_device
from titan_rl.training.export import export_checkpoint
from titan_rl.training.family_check import (
    draw_sequences,
    eager_logprobs,
    logprob_error,
    logprob_tolerance,
    packing_error,
    tolerances_of,
)
from titan_rl.training.models.families import PROVED, RECURRENT, choose_implementation
from titan_rl.training.models.hf_model import read_hf_config
from titan_rl.training.parallel import World
from titan_rl.training.policy import Policy
from titan_rl.training.settings import ModelConfig, TrainingConfig

TOLERANCES = tolerances_of(local_device())

UNTRAINED = ("e_score_correction_bias", "expert_bias")
"""Parameters that balance the experts' loads, and have no gradient."""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def policy(folder: Path) -> Policy:
    model = ModelConfig(path=str(folder), max_context=128, implementation="transformers")
    return Policy(model, TrainingConfig(row_tokens=512), World())


def test_proved_families_are_the_tested_ones() -> None:
    assert {model_type(name) for name in FAMILIES} == set(PROVED)


def tolerance_of(name: str, folder: Path, sequences: list[list[int]]) -> float:
    """Tolerance of the trainer's logprobs compared with transformers in float64. Recurrent layers round more: in
    transformers, too, the gated delta rule always computes in float32."""
    least = TOLERANCES.logprobs
    return logprob_tolerance(folder, sequences, least) if model_type(name) in RECURRENT else least


@pytest.mark.check("a")
def test_logprobs_match_transformers_in_float64(name: str, folder: Path, policy: Policy) -> None:
    sequences = draw_sequences(40, 17, 33, 90)
    assert logprob_error(policy, folder, sequences) < tolerance_of(name, folder, sequences)


@pytest.mark.check("c")
def test_packed_gradients_match_separate_sequences(name: str, policy: Policy) -> None:
    error, frozen = packing_error(policy)
    assert error < TOLERANCES.gradients
    assert all(parameter.endswith(UNTRAINED) for parameter in frozen)


@pytest.mark.check("d")
def test_two_ranks_match_one_rank(name: str, folder: Path, tmp_path: Path) -> None:
    expected = two_steps(folder, tmp_path / "one")
    for found in run_world(two_steps, 2, folder=folder, out=tmp_path / "two", data_parallel=2):
        assert found == pytest.approx(expected, rel=1e-3)
    ours, theirs = (load_file(tmp_path / each / "model.safetensors") for each in ("one", "two"))
    assert ours.keys() == theirs.keys()
    for key, tensor in ours.items():
        torch.testing.assert_close(theirs[key], tensor, rtol=0, atol=1e-4)


@pytest.mark.check("e")
def test_exported_model_matches_trainer_logprobs_in_transformers(name: str, folder: Path, tmp_path: Path) -> None:
    trainer = make(folder)
    trainer.step(on_policy_samples(trainer, 40, 33))
    trainer.export_hf(tmp_path / "export")
    sequences = draw_sequences(40, 17)
    tolerance = tolerance_of(name, tmp_path / "export", sequences)
    for mine, theirs in zip(trainer.score(sequences), eager_logprobs(tmp_path / "export", sequences), strict=True):
        torch.testing.assert_close(torch.tensor(mine, dtype=torch.float64), theirs, rtol=0, atol=tolerance)


@pytest.mark.check("f")
def test_resumed_trainer_continues_bitwise_identically(name: str, folder: Path, tmp_path: Path) -> None:
    whole = make(folder)
    samples = on_policy_samples(whole, 40, 33, 64)
    whole.step(samples)
    whole.save(tmp_path / "step-000001")
    export_checkpoint(folder, tmp_path / "step-000001", tmp_path / "export")
    exported = load_file(tmp_path / "export" / "model.safetensors")
    assert all(torch.equal(tensor, exported[key]) for key, tensor in whole.named_tensors())
    expected = whole.step(samples).metrics
    resumed = make(folder)
    resumed.load(tmp_path / "step-000001")
    assert resumed.step(samples).metrics == expected
    after = weights(whole)
    assert all(torch.equal(tensor, after[key]) for key, tensor in resumed.named_tensors())


@pytest.mark.check("g")
def test_replayed_experts_are_used_and_own_choice_changes_nothing(
    name: str, folder: Path, record_property: Callable[[str, object], None]
) -> None:
    trainers = [make(folder) for _ in range(3)]
    routers = trainers[0]._policy._routers  # pyright: ignore[reportPrivateUsage]
    if not routers:
        pytest.skip("a dense model")
    (sample,) = on_policy_samples(trainers[0], 30)
    trained = [False, *[True] * 29]
    sample = replace(sample, loss_mask=trained, versions=[-1, *[0] * 29], advantages=[0.0, *[1.0] * 29])
    if name in REPLAY_PROBLEMS:
        record_property("works", False)
        with pytest.raises(ModelError, match="does not choose experts by top-k"):
            trainers[1].step([with_experts(sample, own_choice(folder, sample))])
        return
    plain, again = (trainer.step([each]).metrics for trainer, each in zip(
        trainers, (sample, with_experts(sample, own_choice(folder, sample))), strict=False,
    ))  # fmt: skip
    for metric in ("loss", "grad_norm", "ratio_max"):
        assert again[metric] == pytest.approx(plain[metric], rel=1e-4), metric
    given = [[0, 1]] * len(routers)
    other = trainers[2].step([with_experts(sample, [given] * 29)]).metrics
    assert other["grad_norm"] != pytest.approx(plain["grad_norm"], rel=1e-3)


@pytest.mark.check("h")
def test_context_parallel_ranks_match_one_rank(
    name: str, folder: Path, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    if model_type(name) in RECURRENT:
        record_property("works", False)
        with pytest.raises(ModelError, match="need all tokens of a document on one rank"):
            choose_implementation(read_hf_config(folder), context_parallel=2)
        return
    if name not in SHARED_BY_RANKS:
        pytest.skip("included in make test-models")
    compare_with_one_rank(folder, tmp_path, context_parallel=2)


@pytest.mark.check("i")
def test_expert_parallel_ranks_match_one_rank(name: str, folder: Path, policy: Policy, tmp_path: Path) -> None:
    if not policy._routers:  # pyright: ignore[reportPrivateUsage]
        pytest.skip("a dense model")
    if name not in SHARED_BY_RANKS:
        pytest.skip("included in make test-models")
    compare_with_one_rank(folder, tmp_path, data_parallel=2, expert_parallel=2)


def compare_with_one_rank(folder: Path, out: Path, **layout: int) -> None:
    expected = scores_and_gradient(folder, out / "one")
    for found in run_world(scores_and_gradient, 2, folder=folder, out=out / "two", **layout):
        for mine, theirs in zip(found, expected, strict=True):
            assert mine == pytest.approx(theirs, abs=1e-5)
    assert gradient_error(folder, out / "one", out / "two") < 1e-3


def with_experts(sample: Any, chosen: Any) -> Any:
    return replace(sample, routed_experts=[None, *chosen])


def own_choice(folder: Path, sample: Any) -> list[Any]:
    """Experts that each block's router chooses for each token but the last.  # [length - 1][num_layers][top_k]"""
    trainer = make(folder)
    policy = trainer._policy  # pyright: ignore[reportPrivateUsage]
    found: list[torch.Tensor] = []
    hooks = [
        module.experts.register_forward_pre_hook(lambda _, args: found.append(args[1].clone()))
        for module in policy.model.modules()
        if isinstance(getattr(module, "experts", None), torch.nn.Module)
    ]
    trainer.score([list(sample.token_ids)])
    for hook in hooks:
        hook.remove()
    return torch.stack([each[: len(sample.token_ids) - 1] for each in found], 1).tolist()


@pytest.mark.parametrize("tied", [False, True])
def test_both_implementations_make_the_same_step(tied: bool, tmp_path: Path) -> None:
    folder = make_family("llama, tied" if tied else "qwen3", tmp_path / "model")
    losses = {each: two_steps(folder, tmp_path / each, implementation=each) for each in ("torchtitan", "transformers")}
    assert losses["torchtitan"] == pytest.approx(losses["transformers"], rel=1e-3)
    ours, theirs = (load_file(tmp_path / each / "model.safetensors") for each in losses)
    assert ours.keys() == theirs.keys()
    for key, tensor in ours.items():
        torch.testing.assert_close(theirs[key], tensor, rtol=0, atol=1e-4)


def test_threaded_micro_batches_match_one_thread(tmp_path: Path) -> None:
    folder = make_family("gemma2", tmp_path / "model")
    alone, threaded = (make(folder, rows_per_micro_batch=1, num_threads=threads) for threads in (1, 2))
    samples = on_policy_samples(alone, 100, 100, 100, 100)
    assert threaded.step(samples).metrics == pytest.approx(alone.step(samples).metrics)

"""Trainer state between steps: no gradients, and weights and moments in the configured dtypes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchtitan", reason="needs the cpu or gpu extra")

import torch
from depth import in_depth
from e2e.sharded_steps import devices_of_a_policy, steps_and_resumed_steps
from e2e.tiny_policy import make_tiny_moe, make_tiny_qwen3, on_policy_samples, weights
from e2e.warm import run_world
from safetensors.torch import load_file

from titan_rl.core.errors import ConfigError
from titan_rl.training.export import export_checkpoint
from titan_rl.training.settings import ModelConfig, TrainingConfig
from titan_rl.training.trainer import TrainerCore

SETTINGS: dict[str, dict[str, Any]] = {
    "bfloat16 moments": {"optimizer_dtype": "bfloat16"},
    "int8 moments": {"optimizer_dtype": "int8"},
    "bfloat16 weights": {"master_dtype": "bfloat16"},
    "all": {"optimizer_dtype": "int8", "master_dtype": "bfloat16", "offload": ("optimizer",)},
    "moments on the host": {"offload": ("optimizer",)},
}
STATES = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ("bfloat16 moments", "all") else in_depth) for name in SETTINGS]
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_qwen3(tmp_path_factory.mktemp("model"), tied=True)


def make(folder: Path, **training: Any) -> TrainerCore:
    settings = TrainingConfig(**{"steps": 20, "lr": 1e-3, "row_tokens": 128, **training})
    return TrainerCore(ModelConfig(path=str(folder), dtype="bfloat16"), settings, seed=0)


def test_gradients_are_freed_between_steps(folder: Path) -> None:
    trainer = make(folder)
    trainer.step(on_policy_samples(trainer, 40, 33))
    assert all(parameter.grad is None for parameter in trainer._model.parameters())  # pyright: ignore[reportPrivateUsage]


@STATES
def test_resumes_bitwise_identically_and_exports_its_weights(folder: Path, name: str, tmp_path: Path) -> None:
    whole = make(folder, **SETTINGS[name])
    samples = on_policy_samples(whole, 40, 33, 64)
    for _ in range(2):
        whole.step(samples)
    whole.save(tmp_path / "step-000002")
    export_checkpoint(folder, tmp_path / "step-000002", tmp_path / "export", "bfloat16")
    exported = load_file(tmp_path / "export" / "model.safetensors")
    assert all(torch.equal(tensor, exported[name]) for name, tensor in whole.named_tensors())
    expected = [whole.step(samples).metrics for _ in range(2)]
    resumed = make(folder, **SETTINGS[name])
    resumed.step(samples[:1])  # creates moments, which loading replaces
    resumed.load(tmp_path / "step-000002")
    assert [resumed.step(samples).metrics for _ in range(2)] == expected
    assert all(torch.equal(tensor, weights(whole)[name]) for name, tensor in resumed.named_tensors())


@pytest.mark.parametrize("offloaded_first", [False, True])
def test_checkpoint_loads_with_optimizer_offload_toggled(folder: Path, offloaded_first: bool, tmp_path: Path) -> None:
    whole = make(folder, offload=("optimizer",) if offloaded_first else ())
    samples = on_policy_samples(whole, 40, 33, 64)
    whole.step(samples)
    whole.save(tmp_path / "step-000001")
    resumed = make(folder, offload=() if offloaded_first else ("optimizer",))
    resumed.load(tmp_path / "step-000001")
    for _ in range(2):
        found, expected = (trainer.step(samples).metrics["loss"] for trainer in (resumed, whole))
        assert found == pytest.approx(expected, abs=1e-4)


@STATES
def test_low_precision_states_learn_like_float32(folder: Path, name: str) -> None:
    trainer, plain = make(folder, **SETTINGS[name]), make(folder)
    samples = on_policy_samples(plain, 40, 33, 64)
    found = [trainer.step(samples).metrics["loss"] for _ in range(10)]
    expected = [plain.step(samples).metrics["loss"] for _ in range(10)]
    assert found[0] == pytest.approx(expected[0], abs=0.02)
    assert found[-1] - found[0] == pytest.approx(expected[-1] - expected[0], rel=0.1)


SMALL = {"optimizer_dtype": "int8", "master_dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("layout", "states"),
    [
        ("data_parallel", SMALL),
        pytest.param("tensor_parallel", {}, marks=in_depth),
        pytest.param("context_parallel", {}, marks=in_depth),
        pytest.param("tensor_parallel", SMALL, marks=in_depth),
    ],
)
def test_offloaded_parameters_make_the_same_steps(
    folder: Path, layout: str, states: dict[str, Any], tmp_path: Path
) -> None:
    kept, offloaded = (
        run_world(
            steps_and_resumed_steps, 2, folder=folder, out=tmp_path / name, **{layout: 2, "offload": (name,)}, **states
        )
        for name in ("optimizer", "parameters")
    )
    assert offloaded == kept
    for losses, resumed in offloaded:
        assert resumed == losses[-2:]


def test_offloaded_parameters_are_on_the_host_and_buffers_on_the_device(folder: Path) -> None:
    found = run_world(devices_of_a_policy, 2, folder=folder, data_parallel=2, offload_parameters=True)
    assert found == [({"cpu"}, {"meta"}, True)] * 2


def test_rejects_parameter_offload_on_a_single_rank(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"set training\.data_parallel to the number of GPUs"):
        make(folder, offload=("parameters",))


@pytest.mark.parametrize("layout", [{"data_parallel": 2}, {"tensor_parallel": 2}])
@pytest.mark.parametrize("name", ["all", pytest.param("int8 moments", marks=in_depth)])
def test_ranks_match_one_rank_and_resume_bitwise_identically(name: str, layout: dict[str, int], tmp_path: Path) -> None:
    is_dense = "tensor_parallel" in layout
    folder = (make_tiny_qwen3 if is_dense else make_tiny_moe)(tmp_path / "model")
    alone, _ = steps_and_resumed_steps(folder, tmp_path / "one", **SETTINGS[name])
    for losses, resumed in run_world(
        steps_and_resumed_steps, 2, folder=folder, out=tmp_path / "two", **SETTINGS[name], **layout
    ):
        assert losses == pytest.approx(alone, abs=0.05)
        assert resumed == losses[-2:]
    _, resumed = steps_and_resumed_steps(folder, tmp_path / "three", tmp_path / "two" / "saved", **SETTINGS[name])
    assert resumed == pytest.approx(alone[-2:], abs=0.05), "one rank resumes from the checkpoint of two"


def test_rejects_master_dtype_below_model_dtype(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.dtype = .float32"):
        TrainerCore(ModelConfig(path=str(folder)), TrainingConfig(master_dtype="bfloat16"), seed=0)

"""Several adapters of one model in one trainer: each is bitwise identical to training it alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torchtitan", reason="needs the cpu or gpu extra")

import torch
from e2e.tiny_policy import make_tiny_llama3, make_tiny_qwen3, on_policy_samples, weights

from titan_rl.core.errors import UntrainableError
from titan_rl.training.adapter_trainers import AdapterTrainers
from titan_rl.training.export import export_checkpoint
from titan_rl.training.settings import CorrectionConfig, ModelConfig, PolicySettings, TrainingConfig
from titan_rl.training.trainer import TrainerCore

SETTINGS = {
    "sort": {"adapter": {"rank": 4, "alpha": 8.0}, "lr": 1e-2, "algorithm": "gspo"},
    "sum": {"adapter": {"rank": 1, "targets": ("q_proj", "v_proj", "k_proj")}, "lr": 3e-2, "kl_coef": 0.1},
    "tags": {"adapter": {"rank": 8}, "optimizer": "sgd", "lr": 1e-1, "lr_decay": "linear"},
}


def policies(*names: str) -> dict[str, PolicySettings]:
    return {
        name: PolicySettings(TrainingConfig(**{"steps": 10, **SETTINGS[name]}), CorrectionConfig()) for name in names
    }


def trainers(folder: Path, *names: str) -> AdapterTrainers:
    return AdapterTrainers(ModelConfig(path=str(folder)), policies(*names), seed=0)


def step(trainers: AdapterTrainers, name: str) -> None:
    with trainers.turn(name) as trainer:
        trainer.step(on_policy_samples(trainer, 20, 30, 25, 18))
        torch.rand(3)  # a user-defined loss may draw random numbers


def state(trainers: AdapterTrainers, name: str, folder: Path) -> dict[str, bytes]:
    with trainers.turn(name) as trainer:
        trainer.save(folder)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("make", [make_tiny_qwen3, make_tiny_llama3])
def test_adapter_trained_with_others_is_bitwise_identical_to_alone(
    tmp_path: Path, make: Callable[[Path], Path]
) -> None:
    base = make(tmp_path / "model")
    together = trainers(base, *SETTINGS)
    for name in ("sort", "sum", "sort", "tags", "tags", "sum", "sort", "tags"):
        step(together, name)
    for name, count in {"sort": 3, "sum": 2, "tags": 3}.items():
        alone = trainers(base, name)
        for _ in range(count):
            step(alone, name)
        found = state(together, name, tmp_path / f"{name}-together")
        assert found == state(alone, name, tmp_path / f"{name}-alone")  # weights, moments, version and random state
        assert together[name].version == count


def test_frozen_weights_are_shared_in_memory(tmp_path: Path) -> None:
    together = trainers(make_tiny_qwen3(tmp_path / "model", tied=True), *SETTINGS)
    frozen = {name: frozen_storages(together[name]) for name in together}
    assert frozen["sort"]
    assert frozen["sum"] == frozen["tags"] == frozen["sort"]
    assert not trained_storages(together["sort"]) & trained_storages(together["tags"])


def frozen_storages(trainer: TrainerCore) -> set[int]:
    return {parameter.data_ptr() for parameter in trainer._model.parameters() if not parameter.requires_grad}


def trained_storages(trainer: TrainerCore) -> set[int]:
    return {parameter.data_ptr() for parameter in trainer._model.parameters() if parameter.requires_grad}


def test_nonfinite_loss_of_one_adapter_does_not_affect_others(tmp_path: Path) -> None:
    base = make_tiny_qwen3(tmp_path / "model")
    together, alone = trainers(base, "sort", "sum"), trainers(base, "sum")
    with together.turn("sort") as trainer:
        samples = on_policy_samples(trainer, 20, 30)
        advantages = [*samples[0].advantages[:-1], float("nan")]
        samples[0] = replace(samples[0], advantages=advantages)
        with pytest.raises(UntrainableError):
            trainer.step(samples)
    step(together, "sum")
    step(alone, "sum")
    assert state(together, "sum", tmp_path / "together") == state(alone, "sum", tmp_path / "alone")


def test_reference_of_an_adapter_that_starts_from_a_folder_is_the_initial_model(tmp_path: Path) -> None:
    base, begun = make_tiny_qwen3(tmp_path / "model"), tmp_path / "begun"
    first = trainers(base, "sort")
    step(first, "sort")
    first["sort"].save(tmp_path / "saved")
    export_checkpoint(base, tmp_path / "saved", begun, renderer="chat_template", as_adapter=True)
    adapter = {"rank": 4, "alpha": 8.0, "start": str(begun)}
    started = PolicySettings(TrainingConfig(steps=10, adapter=adapter, lr=1e-2, kl_coef=0.1), CorrectionConfig())  # pyright: ignore[reportArgumentType]

    together = AdapterTrainers(ModelConfig(path=str(base)), policies("sum") | {"started": started}, seed=0)
    trainer = together["started"]
    samples = on_policy_samples(trainer, 20, 30)
    found = [trainer.step(samples).metrics["reference_kl"] for _ in range(3)]
    trainer.save(tmp_path / "checkpoint")
    resumed = AdapterTrainers(ModelConfig(path=str(base)), {"started": started}, seed=0)["started"]
    resumed.load(tmp_path / "checkpoint")

    assert found[0] == pytest.approx(0, abs=1e-9)
    assert 1e-6 < found[1] < found[2]
    assert resumed.step(samples) == trainer.step(samples)
    assert weights(resumed).keys() == weights(trainer).keys()

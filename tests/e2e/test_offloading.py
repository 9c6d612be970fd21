"""Offloading to host memory frees the device and leaves steps bitwise identical. On CPUs, the tests count the bytes
that the storages of the model hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchtitan", reason="needs the cpu or gpu extra")

import torch
from e2e.tiny_policy import make_tiny_qwen3, make_trainer, on_policy_samples, sequences, weights
from torch import nn

from titan_rl.training.data.packing import Family
from titan_rl.training.data.sample import TrainingSample
from titan_rl.training.parallel import World
from titan_rl.training.policy import Policy
from titan_rl.training.settings import ModelConfig, TrainingConfig
from titan_rl.training.tensor_batch import TensorBatch, make_tensor_batch


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_qwen3(tmp_path_factory.mktemp("model"), tied=True)


def steps(folder: Path, **settings: Any) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    trainer = make_trainer(folder, lr=1e-3, kl_coef=0.1, activation_checkpointing="full", **settings)
    samples = on_policy_samples(trainer, 50, 20, 33)
    metrics = [trainer.step(samples).metrics for _ in range(2)]
    return [{name: step[name] for name in step if name != "wait_for_copy_s"} for step in metrics], weights(trainer)


def test_offloaded_steps_are_bitwise_identical(folder: Path) -> None:
    metrics, expected = steps(folder)
    offloaded, found = steps(folder, offload=("reference", "activations"))
    assert offloaded == metrics
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def bytes_of(module: nn.Module) -> int:
    storages = {parameter.data_ptr(): parameter.untyped_storage().nbytes() for parameter in module.parameters()}
    return sum(storages.values())


def batch_of(policy: Policy, sequence: list[int]) -> TensorBatch:
    blank, size = [0.0] * len(sequence), len(sequence)
    sample = TrainingSample("", "", sequence, [True] * size, blank, blank, [0] * size, temperature=1.0)
    return make_tensor_batch([[Family((sample,))]], policy.device, policy.lay_out)


def layers_of(policy: Policy) -> list[Any]:
    return list(policy.model.layers.children())


def policy_of(folder: Path, **settings: Any) -> Policy:
    model = ModelConfig(path=str(folder), max_context=64)
    return Policy(model, TrainingConfig(row_tokens=64, **settings), World())


def offloaded_reference(folder: Path) -> Policy:
    training = TrainingConfig(row_tokens=64, kl_coef=0.1, offload=("reference",))
    return Policy(ModelConfig(path=str(folder), max_context=64), training, World(), role="reference")


def test_offloaded_weights_are_loaded_one_layer_at_a_time(folder: Path) -> None:
    plain, policy = policy_of(folder), offloaded_reference(folder)
    assert bytes_of(policy.model) == 0
    there: list[int] = []
    for layer in layers_of(policy):
        layer.attention.register_forward_hook(lambda *_: there.append(bytes_of(policy.model)))
    (sequence,) = sequences(40)
    with torch.no_grad():
        for _ in range(2):
            found = policy.logprobs(batch_of(policy, sequence))
            assert bytes_of(policy.model) == 0
            assert torch.equal(found[0], plain.logprobs(batch_of(plain, sequence))[0])
    of_a_layer = bytes_of(layers_of(plain)[0])
    assert there == [of_a_layer] * len(layers_of(plain)) * 2


def test_offloaded_weights_are_released_after_a_failed_pass(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = offloaded_reference(folder)

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of memory")

    batch = batch_of(policy, sequences(40)[0])
    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(layers_of(policy)[0].attention.inner_attention, "forward", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            policy.logprobs(batch)
    assert bytes_of(policy.model) == 0
    with torch.no_grad():
        assert torch.equal(policy.logprobs(batch)[0], policy_of(folder).logprobs(batch)[0])


@pytest.mark.parametrize("offload", [False, True])
def test_offloaded_activations_are_not_kept_on_the_device(folder: Path, offload: bool) -> None:
    policy = policy_of(folder, activation_checkpointing="full", offload=("activations",) if offload else ())
    given: list[Any] = []
    for layer in layers_of(policy):
        layer.register_forward_pre_hook(
            lambda _, args: given.append(torch.multiprocessing.reductions.StorageWeakRef(args[0].untyped_storage()))
        )
    logprobs_N, _ = policy.logprobs(batch_of(policy, sequences(40)[0]))
    assert [each.expired() for each in given] == [offload, offload]
    logprobs_N.sum().backward()

"""LoRA adapters in the trainer: training, checkpoints, publishing and export, compared with PEFT."""

from __future__ import annotations

import dataclasses
import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchtitan", reason="needs the cpu or gpu extra")
pytest.importorskip("peft", reason="needs the dev extra")

import peft
import torch
from e2e.tiny_policy import (
    make_tiny_llama3,
    make_tiny_moe,
    make_tiny_qwen3,
    make_trainer,
    on_policy_samples,
    sequences,
    transformers_logprobs,
    weights,
)
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from titan_rl.core.errors import CheckpointError, ModelError
from titan_rl.rollout.renderer.registry import fit_template
from titan_rl.training import export
from titan_rl.training.export import export_checkpoint, merge_peft
from titan_rl.training.publishing import WeightPublisher
from titan_rl.training.settings import ModelConfig, TrainingConfig
from titan_rl.training.trainer import TrainerCore
from titan_rl.weights.transports.shared_memory import SharedMemoryTransport

ADAPTER = {"rank": 4, "alpha": 8.0}
FILES = {"adapter": "adapter_model.safetensors", "model": "model.safetensors"}
FAMILIES = {"qwen3": make_tiny_qwen3, "llama3": make_tiny_llama3}


def trained(folder: Path, steps: int = 2, **training: object) -> TrainerCore:
    trainer = make_trainer(folder, **{"adapter": ADAPTER, "lr": 1e-2, **training})
    for _ in range(steps):
        trainer.step(on_policy_samples(trainer, 20, 30, 25, 18))
    return trainer


def peft_model(base: Path, folder: Path) -> torch.nn.Module:
    return peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), folder)


@pytest.mark.parametrize("make", FAMILIES.values(), ids=FAMILIES)
def test_exported_adapter_and_merged_model_match_trainer_scores(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    base = make(tmp_path / "model")
    trainer = trained(base)
    trainer.save(tmp_path / "checkpoint")
    export_checkpoint(base, tmp_path / "checkpoint", tmp_path / "adapter", as_adapter=True)
    export_checkpoint(base, tmp_path / "checkpoint", tmp_path / "merged")

    (sequence,) = sequences(24)
    expected = torch.tensor(trainer.score([sequence])[0])
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    for model in (peft_model(base, tmp_path / "adapter"), merged):
        torch.testing.assert_close(transformers_logprobs(model, sequence), expected, rtol=0, atol=1e-5)
    untrained = make_trainer(base).score([sequence])[0]
    assert (expected - torch.tensor(untrained)).abs().max() > 1e-2


def test_export_program_writes_the_same_bytes_as_the_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = make_tiny_qwen3(tmp_path / "model")
    trained(base, steps=1).save(tmp_path / "checkpoint")
    for form, file in FILES.items():
        export_checkpoint(base, tmp_path / "checkpoint", tmp_path / "expected" / form, as_adapter=form == "adapter")
        paths = map(str, (base, tmp_path / "checkpoint", tmp_path / form))
        monkeypatch.setattr(sys, "argv", ["export.py", *paths, "float32", "chat_template", form])
        runpy.run_path(export.__file__, run_name="__main__")
        assert (tmp_path / form / file).read_bytes() == (tmp_path / "expected" / form / file).read_bytes()


def test_merged_weights_are_exactly_base_plus_scaled_product(tmp_path: Path) -> None:
    base = make_tiny_qwen3(tmp_path / "model")
    trainer = trained(base)
    trainer.save(tmp_path / "checkpoint")
    export_checkpoint(base, tmp_path / "checkpoint", tmp_path / "merged")

    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).state_dict()
    matrices = {name: piece.tensor for name, piece in trainer.held_slices()}
    for name, weight in AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).state_dict().items():
        layer = name.removesuffix(".weight")
        if f"{layer}.lora_A.weight" in matrices:
            a, b = matrices.pop(f"{layer}.lora_A.weight"), matrices.pop(f"{layer}.lora_B.weight")
            weight = weight + 2.0 * (b @ a)
        assert torch.equal(merged[name], weight), name
    assert not matrices


def written_by_peft(base: Path, folder: Path, **options: Any) -> torch.nn.Module:
    """Write a folder of an adapter with random matrices, and return PEFT's own model."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    adapted = peft.get_peft_model(model, peft.LoraConfig(**{"r": 4, "lora_alpha": 8} | options))
    generator = torch.Generator().manual_seed(0)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    adapted.save_pretrained(str(folder))
    return adapted.eval()


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": "all-linear"},
        {"target_modules": r".*\.layers\.0\..*\.(q_proj|up_proj)"},
        {"target_modules": ["q_proj", "down_proj"], "layers_to_transform": [1]},
        {"target_modules": ["self_attn.q_proj", "o_proj"]},
        {"target_modules": ["v_proj"], "init_lora_weights": "orthogonal"},
        {"target_modules": ["q_proj"], "init_lora_weights": "mica"},
        {"target_modules": ["q_proj"], "init_lora_weights": False},
        {"target_modules": ["q_proj"], "init_lora_weights": "gaussian", "lora_dropout": 0.5},
    ],
    ids=str,
)
def test_merge_equals_what_peft_computes_for_the_layers_that_it_adapted(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    base = make_tiny_qwen3(tmp_path / "model")
    expected = written_by_peft(base, tmp_path / "adapter", **options)
    merge_peft(base, tmp_path / "adapter", tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    (sequence,) = sequences(24)
    logprobs, of_base = (
        transformers_logprobs(model, sequence)
        for model in (merged, AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32))
    )
    torch.testing.assert_close(logprobs, transformers_logprobs(expected, sequence), rtol=0, atol=1e-5)
    assert (logprobs - of_base).abs().max() > 1e-3


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_adapter_of_a_base_that_peft_has_changed_is_refused_until_it_is_converted(tmp_path: Path, init: str) -> None:
    base = make_tiny_qwen3(tmp_path / "model")
    options: dict[str, Any] = {"target_modules": ["q_proj"], "init_lora_weights": init}
    model: Any = written_by_peft(base, tmp_path / "adapter", **options)
    with pytest.raises(ModelError, match=f"has init_lora_weights '{init}', which changes the weights of the base"):
        merge_peft(base, tmp_path / "adapter", tmp_path / "merged")
    fresh: Any = peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), peft.LoraConfig(r=4, lora_alpha=8, **options)
    )
    fresh.peft_config["default"].init_lora_weights = True
    fresh.save_pretrained(str(tmp_path / "initial"))
    initial = str(tmp_path / "initial")
    model.save_pretrained(str(tmp_path / "converted"), path_initial_model_for_weight_conversion=initial)
    merge_peft(base, tmp_path / "converted", tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    (sequence,) = sequences(24)
    expected = transformers_logprobs(model, sequence)
    torch.testing.assert_close(transformers_logprobs(merged, sequence), expected, rtol=0, atol=1e-4)


def test_each_option_of_peft_is_known_or_refused_when_it_is_set(tmp_path: Path) -> None:
    """A new option of PEFT is refused until it is considered and named here."""
    harmless = {
        *("r", "lora_alpha", "target_modules", "init_lora_weights", "base_model_name_or_path", "revision", "task_type"),
        *("auto_mapping", "peft_version", "inference_mode", "lora_dropout", "velora_config", "megatron_config"),
        *("megatron_core", "runtime_config", "ensure_weight_tying", "exclude_modules", "layers_to_transform"),
        *("layers_pattern", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size"),
    }
    written_by_peft(base := make_tiny_qwen3(tmp_path / "model"), tmp_path / "adapter", target_modules=["q_proj"])
    path = tmp_path / "adapter" / "adapter_config.json"
    written = json.loads(path.read_text())
    for field in dataclasses.fields(peft.LoraConfig):
        if field.name in harmless:
            continue
        path.write_text(json.dumps(written | {field.name: "set"}))
        with pytest.raises(ModelError, match=f"has {field.name} 'set'"):
            merge_peft(base, tmp_path / "adapter", tmp_path / "merged")


def test_bfloat16_merge_rounds_once(tmp_path: Path) -> None:
    base = make_tiny_qwen3(tmp_path / "model")
    trained(base).save(tmp_path / "checkpoint")
    export_checkpoint(base, tmp_path / "checkpoint", tmp_path / "merged")
    exact = load_file(tmp_path / "merged" / "model.safetensors")
    export_checkpoint(base, tmp_path / "checkpoint", tmp_path / "rounded", "bfloat16")
    export_checkpoint(base, tmp_path / "checkpoint", tmp_path / "adapter", as_adapter=True)
    merge_peft(base, tmp_path / "adapter", tmp_path / "same", "bfloat16")
    for folder in ("rounded", "same"):
        rounded = load_file(tmp_path / folder / "model.safetensors")
        assert all(torch.equal(rounded[name], weight.bfloat16()) for name, weight in exact.items())


def test_merge_rounds_the_base_first_after_bfloat16_training(tmp_path: Path) -> None:
    base = make_tiny_qwen3(tmp_path / "model")
    settings = TrainingConfig(steps=10, adapter=ADAPTER, lr=1e-2)  # pyright: ignore[reportArgumentType]
    trainer = TrainerCore(ModelConfig(path=str(base), dtype="bfloat16"), settings, seed=0)
    trainer.step(on_policy_samples(trainer, 20, 30, 25, 18))
    trainer.begin_save(tmp_path / "checkpoint", {"run_state.json": '{"settings": {"model.dtype": "bfloat16"}}'})
    trainer.finish_save()
    trainer.export_hf(tmp_path / "at the end", fit_template(base, "chat_template"))
    export_checkpoint(base, tmp_path / "checkpoint", tmp_path / "later", "bfloat16")
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("at the end", "later"))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_adapter_checkpoint_is_small_and_resumes_bitwise_identically(tmp_path: Path) -> None:
    base = make_tiny_qwen3(tmp_path / "model")
    trainer = trained(base)
    trainer.save(tmp_path / "checkpoint")
    samples = on_policy_samples(trainer, 22, 31, 24, 19)
    trainer.step(samples)

    resumed = make_trainer(base, adapter=ADAPTER, lr=1e-2)
    resumed.load(tmp_path / "checkpoint")
    assert resumed.version == 2
    resumed.step(samples)
    after, expected = weights(resumed), weights(trainer)
    assert all(torch.equal(after[name], expected[name]) for name in expected)
    saved = sum(file.stat().st_size for file in (tmp_path / "checkpoint").glob("*.safetensors"))
    elements = sum(piece.tensor.numel() for _, piece in trainer.held_slices())
    assert saved < 3 * 4 * elements + 40_000  # A, B, and two moments of each, with the names


def test_rejects_checkpoint_of_another_adapter_setting(tmp_path: Path) -> None:
    base = make_tiny_qwen3(tmp_path / "model")
    trained(base, steps=1).save(tmp_path / "checkpoint")
    for adapter in ({"rank": 0}, {"rank": 4, "alpha": 16.0}):
        with pytest.raises(CheckpointError, match=r"an adapter of rank 4 and alpha 8, and \[training.adapter\]"):
            make_trainer(base, adapter=adapter).load(tmp_path / "checkpoint")
    make_trainer(base).save(tmp_path / "whole")
    with pytest.raises(CheckpointError, match="has no adapter: its run trained all weights"):
        export_checkpoint(base, tmp_path / "whole", tmp_path / "adapter", as_adapter=True)


def test_published_version_has_exactly_the_adapter_bytes(tmp_path: Path) -> None:
    base = make_tiny_qwen3(tmp_path / "model")
    trainer = trained(base, steps=0, adapter={"rank": 1})
    with SharedMemoryTransport("test-adapter-bytes") as transport:
        manifest = WeightPublisher(trainer, transport).publish()
        attention = (64 + 128) + 2 * (64 + 64) + (128 + 64)
        mlp = 3 * (64 + 128)
        assert sum(entry.num_bytes for shard in manifest.shards for entry in shard.entries) == 2 * (attention + mlp) * 4
        read = dict(transport.pull(manifest))
    assert read["model.layers.1.self_attn.k_proj.lora_B.weight"].shape == (64, 1)
    assert read["model.layers.0.mlp.down_proj.lora_A.weight"].shape == (1, 128)


def test_kl_reference_is_the_base_model(tmp_path: Path) -> None:
    base = make_tiny_qwen3(tmp_path / "model")
    results = {}
    for name, kl_coef in (("policy", 0.0), ("with kl", 0.5)):
        trainer = trained(base, kl_coef=kl_coef)
        results[name] = trainer.step(on_policy_samples(trainer, 20, 30)).metrics
    assert results["with kl"]["reference_kl"] > 0
    first = make_trainer(base, adapter=ADAPTER, lr=1e-2, kl_coef=0.5)
    assert first.step(on_policy_samples(first, 20, 30)).metrics["reference_kl"] == pytest.approx(0.0, abs=1e-9)


def test_training_starts_from_an_exported_adapter(tmp_path: Path) -> None:
    base = make_tiny_llama3(tmp_path / "model")
    trainer = trained(base)
    trainer.save(tmp_path / "checkpoint")
    export_checkpoint(base, tmp_path / "checkpoint", tmp_path / "adapter", as_adapter=True)

    started = make_trainer(base, adapter=ADAPTER | {"start": str(tmp_path / "adapter")})
    found, expected = weights(started), weights(trainer)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    with pytest.raises(ModelError, match=r"has lora_alpha 8.0, and training.adapter.alpha is 32"):
        make_trainer(base, adapter={"rank": 4, "start": str(tmp_path / "adapter")})
    with pytest.raises(ModelError, match=r"which training.adapter.targets does not name"):
        make_trainer(base, adapter=ADAPTER | {"targets": ["q_proj"], "start": str(tmp_path / "adapter")})


def test_targets_select_the_adapted_layers(tmp_path: Path) -> None:
    trainer = make_trainer(make_tiny_qwen3(tmp_path / "model"), adapter={"rank": 2, "targets": ["o_proj", "up_proj"]})
    layers = {name.split(".")[4] for name, _ in trainer.held_slices()}
    assert layers == {"o_proj", "up_proj"}
    with pytest.raises(ModelError, match="one of k_proj and v_proj"):
        make_trainer(tmp_path / "model", adapter={"rank": 2, "targets": ["k_proj"]})


def test_moe_gets_adapters_in_attention_only(tmp_path: Path) -> None:
    base = make_tiny_moe(tmp_path / "model")
    trainer = trained(base, steps=1)
    assert {name.split(".")[3] for name, _ in trainer.held_slices()} == {"self_attn"}
    with pytest.raises(ModelError, match=r"targets has 'up_proj', and the model has no linear layer of that name"):
        make_trainer(base, adapter={"rank": 2, "targets": ["up_proj"]})


def test_bfloat16_keeps_the_base_in_bfloat16_and_the_adapter_in_float32(tmp_path: Path) -> None:
    base = make_tiny_qwen3(tmp_path / "model")
    training = TrainingConfig.model_validate({"adapter": ADAPTER, "lr": 1e-2, "activation_checkpointing": "full"})
    trainer = TrainerCore(ModelConfig(path=str(base), dtype="bfloat16"), training, seed=0)
    trainer.step(on_policy_samples(trainer, 20, 30, 25, 18))
    dtypes = {parameter.requires_grad: parameter.dtype for parameter in trainer._model.parameters()}
    assert dtypes == {False: torch.bfloat16, True: torch.float32}
    assert trainer.score_published(sequences(20)) != trainer.score(sequences(20))

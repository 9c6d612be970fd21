"""Adapters in the transformers implementation: the trainer, PEFT and merged exports agree on logprobs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchtitan", reason="needs the cpu or gpu extra")
pytest.importorskip("peft", reason="needs the dev extra")

import peft
import torch
from e2e.tiny_policy import on_policy_samples, sequences, transformers_logprobs, weights
from models.families import ADAPTED_TARGETS, ALL, FAMILIES, SELECTED, make_family, model_type
from models.steps import make
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from titan_rl.core.errors import ModelError
from titan_rl.training.export import export_checkpoint, merge_peft
from titan_rl.training.models.families import ADAPTED
from titan_rl.training.trainer import TrainerCore

ADAPTER = {"rank": 4, "alpha": 8.0}
NAMES = tuple(name for name in (FAMILIES if ALL else SELECTED) if model_type(name) in ADAPTED)


@pytest.fixture(scope="module", params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    """Name of a family whose models can have adapters."""
    return request.param


def adapted(name: str, folder: Path, *, steps: int = 2, **settings: Any) -> TrainerCore:
    adapter = ADAPTER | {"targets": ADAPTED_TARGETS.get(name, ())}
    trainer = make(folder, **{"adapter": adapter, "lr": 1e-2, **settings})
    for _ in range(steps):
        trainer.step(on_policy_samples(trainer, 40, 33))
    return trainer


def test_exports_match_the_trainer_and_resume_is_bitwise_identical(name: str, folder: Path, tmp_path: Path) -> None:
    trainer = adapted(name, folder)
    trainer.save(tmp_path / "checkpoint")
    export_checkpoint(folder, tmp_path / "checkpoint", tmp_path / "adapter", renderer="chat_template", as_adapter=True)
    export_checkpoint(folder, tmp_path / "checkpoint", tmp_path / "merged", renderer="chat_template")
    (sequence,) = sequences(24)
    expected = torch.tensor(trainer.score([sequence])[0])
    merge_peft(folder, tmp_path / "adapter", tmp_path / "same", renderer="chat_template")
    same, exported = (load_file(tmp_path / each / "model.safetensors") for each in ("same", "merged"))
    assert all(torch.equal(same[key], exported[key]) for key in exported)
    eager = {"dtype": torch.float32, "attn_implementation": "eager"}  # the default attention ignores softcapping
    merged: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", **eager).eval()
    base: Any = AutoModelForCausalLM.from_pretrained(folder, **eager)
    with_peft = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    for model in (merged, with_peft):
        torch.testing.assert_close(transformers_logprobs(model, sequence), expected, rtol=0, atol=1e-5)

    samples = on_policy_samples(trainer, 22, 31)
    trainer.step(samples)
    resumed = adapted(name, folder, steps=0)
    assert (expected - torch.tensor(resumed.score([sequence])[0])).abs().max() > 1e-2
    resumed.load(tmp_path / "checkpoint")
    resumed.step(samples)
    after, expected_after = weights(resumed), weights(trainer)
    assert all(torch.equal(after[key], expected_after[key]) for key in expected_after)


def test_reference_is_the_base_and_only_adapted_layers_change(name: str, folder: Path) -> None:
    trainer = adapted(name, folder, steps=0, kl_coef=0.5, activation_checkpointing="full")
    base = weights(trainer)
    first = trainer.step(on_policy_samples(trainer, 40, 33)).metrics["reference_kl"]
    assert first == pytest.approx(0.0, abs=1e-9)
    assert trainer.step(on_policy_samples(trainer, 40, 33)).metrics["reference_kl"] > 0
    layers = {key.rpartition(".lora_")[0] for key, _ in trainer.held_slices()}
    changed = {key.removesuffix(".weight") for key, weight in weights(trainer).items() if not weight.equal(base[key])}
    assert changed == layers


@pytest.mark.parametrize(
    ("name", "targets", "message"),
    [
        ("phi3", [], "'phi3' is trained without adapters"),
        ("gpt2", [], "'gpt2' is trained without adapters"),
        ("glm4", [], "the model has gate_up_proj, which cannot be adapted: .* among q_proj, k_proj, v_proj, o_proj"),
        ("mixtral", ["gate_proj"], r"targets has 'gate_proj', and the model has no linear layer of that name"),
    ],
)
def test_rejects_layers_that_cannot_be_adapted(name: str, targets: list[str], message: str, tmp_path: Path) -> None:
    folder = make_family(name, tmp_path / "model")
    with pytest.raises(ModelError, match=message):
        make(folder, adapter=ADAPTER | {"targets": targets})


def test_mixture_gets_adapters_in_attention_only(tmp_path: Path) -> None:
    trainer = make(make_family("qwen2_moe", tmp_path / "model"), adapter=ADAPTER)
    assert {key.split(".")[3] for key, _ in trainer.held_slices()} == {"self_attn"}


def test_trainer_starts_only_from_a_peft_folder_of_its_model(tmp_path: Path) -> None:
    folder = make_family("qwen2", tmp_path / "model")
    base: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    settings = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model = peft.get_peft_model(base, settings)
    model.save_pretrained(str(tmp_path / "adapter"))
    start = ADAPTER | {"start": str(tmp_path / "adapter"), "targets": ["q_proj", "down_proj"]}
    (sequence,) = sequences(24)
    found = torch.tensor(make(folder, adapter=start).score([sequence])[0])
    torch.testing.assert_close(found, transformers_logprobs(model.eval(), sequence), rtol=0, atol=1e-5)

    for changed, message in (
        (
            {"targets": ["q_proj", "o_proj", "down_proj"]},
            r"lacks model.layers.0.self_attn.o_proj.lora_A.* and 3",
        ),
        ({"rank": 2}, "has r 4, and training.adapter.rank is 2"),
    ):
        with pytest.raises(ModelError, match=message):
            make(folder, adapter=start | changed)
    other = make_family("gemma3_text", tmp_path / "other")
    with pytest.raises(ModelError, match=r"has shape \(.*\); this model needs \(|lacks model.layers"):
        make(other, adapter=start)

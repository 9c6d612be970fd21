"""Model families: the trainer, transformers and vLLM agree, and training works."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchtitan", reason="needs the cpu or gpu extra")
pytest.importorskip("vllm", reason="needs the cpu or gpu extra")

import torch
from depth import in_depth
from e2e.tiny_policy import (
    YARN,
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

from titan_rl.core.errors import ModelError, TrainingError
from titan_rl.generation.engine import EngineSpec
from titan_rl.generation.vllm_engine import VLLMEngine
from titan_rl.training.settings import ModelConfig, TrainingConfig
from titan_rl.training.trainer import TrainerCore

FAMILIES: dict[str, Callable[[Path], Path]] = {
    "qwen3": make_tiny_qwen3,
    "llama": make_tiny_llama3,
    "qwen3_moe": make_tiny_moe,
    "llama, tied": partial(make_tiny_llama3, tied=True),
    "qwen3, YaRN": partial(make_tiny_qwen3, rope=YARN),
}


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return FAMILIES[request.param](tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("make", [make_tiny_qwen3, make_tiny_llama3])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"attention_factor": 1.7},
        {"mscale": 1.0, "mscale_all_dim": 0.5},
        {"beta_fast": 20.0, "beta_slow": 2.0, "truncate": False},
        {"factor": 1.0},
        {"original_max_position_embeddings": None},
    ],
)
def test_yarn_matches_transformers(tmp_path: Path, make: Callable[..., Path], more: dict[str, Any]) -> None:
    rope = {name: value for name, value in (YARN | more).items() if value is not None}
    folder = make(tmp_path / "model", rope=rope)
    trainer = TrainerCore(ModelConfig(path=str(folder), max_context=600), TrainingConfig(row_tokens=600), seed=0)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    (sequence,) = sequences(600)
    scores = torch.tensor(trainer.score([sequence])[0])
    torch.testing.assert_close(scores, transformers_logprobs(model, sequence), rtol=0, atol=2e-5)


def test_yarn_is_read_from_legacy_rope_scaling(tmp_path: Path) -> None:
    folder = make_tiny_qwen3(tmp_path / "model", rope=YARN)
    scores = make_trainer(folder).score(sequences(200))
    config = json.loads((folder / "config.json").read_text())
    del config["rope_parameters"]
    scaling = {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 128}
    (folder / "config.json").write_text(json.dumps(config | {"rope_theta": 50000.0, "rope_scaling": scaling}))
    assert make_trainer(folder).score(sequences(200)) == scores


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "linear", "factor": 2.0}, "rope type 'linear'; only 'default' and 'yarn' are supported"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, r"partial_rotary_factor 0\.5"),
    ],
)
def test_torchtitan_rejects_unsupported_rope_types(tmp_path: Path, rope: dict[str, Any], message: str) -> None:
    folder = make_tiny_qwen3(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rope_parameters": rope}))
    asked = ModelConfig(path=str(folder), implementation="torchtitan")
    with pytest.raises(ModelError, match=message):
        TrainerCore(asked, TrainingConfig(steps=10), seed=0)


def test_scores_and_published_names_match_transformers(folder: Path) -> None:
    trainer = make_trainer(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for sequence, scores in zip(sequences(40, 17), trainer.score(sequences(40, 17)), strict=True):
        torch.testing.assert_close(torch.tensor(scores), transformers_logprobs(model, sequence), rtol=0, atol=2e-5)
    published, stored = weights(trainer), load_file(folder / "model.safetensors")
    assert published.keys() == stored.keys()
    assert all(torch.equal(tensor, stored[name]) for name, tensor in published.items())


@pytest.mark.parametrize(
    "folder",  # test_checkpoint.py compares the scores of tied embeddings
    [pytest.param(name, marks=in_depth if name == "llama, tied" else ()) for name in FAMILIES],
    indirect=True,
)
def test_vllm_matches_trainer_scores_after_a_step(folder: Path) -> None:
    trainer = make_trainer(folder, lr=1e-2)
    before = weights(trainer)
    trainer.step(on_policy_samples(trainer, 40, 33))
    moved = [name for name, tensor in weights(trainer).items() if not torch.equal(tensor, before[name])]
    assert len(moved) > 0.9 * len(before)
    engine = VLLMEngine(EngineSpec(str(folder), max_context=128, kv_cache_gib=0.1))
    engine.load_state_dict(list(trainer.named_tensors()), 1)
    for mine, theirs in zip(trainer.score(sequences(40, 17)), engine.score(sequences(40, 17)), strict=True):
        torch.testing.assert_close(torch.tensor(theirs), torch.tensor(mine), rtol=0, atol=2e-5)
    engine.close()


NUM_LAYERS, TOP_K, NUM_EXPERTS = 3, 2, 6


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_moe(tmp_path_factory.mktemp("moe"))


def with_experts(sample: Any, experts: Any) -> Any:
    rows = [experts if trained else None for trained in sample.loss_mask]
    return replace(sample, routed_experts=rows)


def own_choice(folder: Path, token_ids: list[int]) -> Any:
    """Experts that transformers' routers choose for each token.  # [num_tokens, num_layers, top_k]"""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    logits = model(torch.tensor([token_ids]), output_router_logits=True).router_logits
    chosen = torch.stack([layer.topk(TOP_K).indices for layer in logits], dim=1)
    return [None, *chosen[:-1].tolist()]


def test_replaying_own_routing_does_not_change_the_step(moe: Path) -> None:
    trainer, replayed = make_trainer(moe), make_trainer(moe)
    (sample,) = on_policy_samples(trainer, 30)
    chosen = own_choice(moe, list(sample.token_ids))
    rows = [row if trained else None for row, trained in zip(chosen, sample.loss_mask, strict=True)]
    plain = trainer.step([sample]).metrics
    again = replayed.step([replace(sample, routed_experts=rows)]).metrics
    for name in ("loss", "grad_norm", "ratio_max"):
        assert again[name] == pytest.approx(plain[name], rel=1e-5), name


@pytest.mark.parametrize("activation_checkpointing", ["none", "full"])
def test_replayed_experts_are_used_in_forward_and_backward(moe: Path, activation_checkpointing: str) -> None:
    trainer = make_trainer(moe, activation_checkpointing=activation_checkpointing)
    (sample,) = on_policy_samples(trainer, 30)
    # All tokens but the first are trained, so each position with a loss uses the replayed experts.
    trained = [False, *[True] * 29]
    sample = replace(sample, loss_mask=trained, versions=[-1, *[0] * 29], advantages=[0.0, *[1.0] * 29])
    before = weights(trainer)
    trainer.step([with_experts(sample, [[0, 3]] * NUM_LAYERS)])
    after = weights(trainer)
    for layer in range(NUM_LAYERS):
        for expert in range(NUM_EXPERTS):
            name = f"model.layers.{layer}.mlp.experts.{expert}.down_proj.weight"
            assert torch.equal(after[name], before[name]) == (expert not in (0, 3))


@pytest.mark.parametrize(
    ("experts", "message"),
    [
        ([[0, 1]] * 2, r"routed experts of \(2, 2\)"),
        ([[0, 1]] * 2 + [[0, 6]], "routed to expert 6; the model has 6"),
    ],
)
def test_rejects_routed_experts_of_another_model(moe: Path, experts: Any, message: str) -> None:
    trainer = make_trainer(moe)
    (sample,) = on_policy_samples(trainer, 30)
    with pytest.raises(TrainingError, match=message):
        trainer.step([with_experts(sample, experts)])

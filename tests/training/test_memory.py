"""Estimated memory of a trainer rank compared with measurements on a CPU and with known models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchtitan", reason="needs the cpu or gpu extra")

import torch
from e2e.tiny_policy import make_tiny_qwen3, on_policy_samples
from e2e.warm import run_world
from models.families import FAMILIES, make_family, model_type
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from titan_rl.core.errors import ModelError
from titan_rl.training.activation_memory import (
    ActivationMemory,
    DecoderSpec,
    MemoryTracker,
    MicroBatchShape,
    measure_activations,
)
from titan_rl.training.attention.attention import layout_documents
from titan_rl.training.attention.documents import Document
from titan_rl.training.choices import Implementation
from titan_rl.training.memory import rank_memory, update_bytes
from titan_rl.training.models.shrunken_models import tiny_config
from titan_rl.training.optimizer.optimizers import CompactAdam
from titan_rl.training.parallel import World
from titan_rl.training.policy import Policy
from titan_rl.training.settings import ModelConfig, TrainingConfig
from titan_rl.training.trainer import TrainerCore

MODEL_CONFIGS = Path(__file__).resolve().parents[2] / "scripts" / "model_configs"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_qwen3(tmp_path_factory.mktemp("model"), tied=True, num_layers=4)


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def test_expert_parallel_ranks_gather_only_their_experts() -> None:
    hf = json.loads((MODEL_CONFIGS / "qwen3_30b_a3b.json").read_text()) | {"num_hidden_layers": 2}
    model = ModelConfig(path="", dtype="bfloat16")
    whole, divided = (
        rank_memory(model, TrainingConfig(data_parallel=8, expert_parallel=ranks, row_tokens=512), hf=hf).device
        for ranks in (1, 8)
    )
    for component in ("master weights", "gradients", "optimizer states"):
        assert divided[component] == whole[component]
    assert divided["gathered layers"] < whole["gathered layers"] / 2


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("qwen3_8b", 8_190_735_360),
        ("qwen3_30b_a3b", 30_532_122_624),
        ("llama_70b", 70_553_706_496),
        ("qwen3_235b_a22b", 235_093_634_560),
    ],
)
def test_parameter_counts_of_public_models(name: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("titan_rl.training.memory.measure_activations", lambda *_: ActivationMemory(0, 0, 0))
    hf = json.loads((MODEL_CONFIGS / f"{name}.json").read_text())
    model = ModelConfig(path=name, dtype="bfloat16")
    training = TrainingConfig(data_parallel=64, activation_checkpointing="full", row_tokens=512, rows_per_micro_batch=1)
    found = rank_memory(model, training, hf=hf)
    assert found.parameters == count
    assert found.device["master weights"] == pytest.approx(4 * count / 64, rel=0.01)
    assert found.device["optimizer states"] == pytest.approx(8 * count / 64, rel=0.01)


@pytest.mark.parametrize("name", ["qwen2", "llama, tied", "gemma3_text", "gpt2", "mixtral", "deepseek_v3", "gpt_oss"])
def test_parameter_count_matches_transformers(name: str) -> None:
    config = tiny_config(AutoConfig.for_model(model_type(name)), **FAMILIES[name])
    with torch.device("meta"):
        expected = sum(each.numel() for each in AutoModelForCausalLM.from_config(config).parameters())
    model = ModelConfig(path=name, implementation="transformers", max_context=64)
    found = rank_memory(model, TrainingConfig(row_tokens=64), hf=config.to_dict(), device="cpu")
    assert found.parameters == expected
    assert found.device["weights"] == 4 * expected


@pytest.mark.parametrize(
    "given",
    [{}, {"optimizer_dtype": "bfloat16"}, {"optimizer_dtype": "int8", "master_dtype": "bfloat16"}],
    ids=["float32", "bfloat16 moments", "int8 moments, bfloat16 weights"],
)
def test_weight_and_moment_memory_matches_estimate(folder: Path, given: dict[str, Any]) -> None:
    model, training = ModelConfig(path=str(folder), dtype="bfloat16"), TrainingConfig(**given)
    trainer = TrainerCore(model, training, seed=0)
    trainer.step(on_policy_samples(trainer, 40))
    computed = rank_memory(model, training).device
    weights = computed.get("master weights", computed.get("weights"))
    assert sum(each.nbytes for each in trainer._model.parameters()) == weights  # pyright: ignore[reportPrivateUsage]
    parts = trainer._optimizers.parts  # pyright: ignore[reportPrivateUsage]
    states = [tensor for part in parts for state in part.state.values() for tensor in state.values()]
    # A tiny model has short rows, so the scales of 8-bit moments, 8 bytes per row, weigh more.
    assert sum(tensor.nbytes for tensor in states) == pytest.approx(computed["optimizer states"], rel=0.15)


@pytest.mark.parametrize("master_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("optimizer_dtype", ["bfloat16", "int8"])
def test_update_memory_matches_estimate(optimizer_dtype: Any, master_dtype: Any) -> None:
    weight = nn.Parameter(torch.ones(1024, 512, dtype=getattr(torch, master_dtype)))
    settings: dict[str, Any] = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "decoupled": True}
    optimizer = CompactAdam([weight], lr=1e-3, state_dtype=optimizer_dtype, **settings)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    held = [weight.grad, *optimizer.state[weight].values()]
    with MemoryTracker([weight, *held]) as tracker:
        optimizer.step()
    training = TrainingConfig(optimizer_dtype=optimizer_dtype, master_dtype=master_dtype)
    assert tracker.peak == pytest.approx(update_bytes(training, weight.numel()), rel=0.05)


def bytes_of_a_rank(folder: Path) -> tuple[int, int]:
    """Bytes of weights and moments on this rank after a step."""
    training = TrainingConfig(steps=2, row_tokens=64, rows_per_micro_batch=2, data_parallel=2)
    trainer = TrainerCore(ModelConfig(path=str(folder), dtype="bfloat16"), training, seed=0)
    model: Any = trainer._model  # pyright: ignore[reportPrivateUsage]
    trainer.step(on_policy_samples(trainer, 40, 30))
    states = [each for part in trainer._optimizers.parts for each in part.state.values()]  # pyright: ignore[reportPrivateUsage]
    moments = sum(state[name].to_local().nbytes for state in states for name in ("exp_avg", "exp_avg_sq"))
    return sum(parameter.to_local().nbytes for parameter in model.parameters()), moments


def test_sharded_rank_memory_matches_estimate(folder: Path) -> None:
    model, training = ModelConfig(path=str(folder), dtype="bfloat16"), TrainingConfig(data_parallel=2)
    computed = rank_memory(model, training)
    for weights, moments in run_world(bytes_of_a_rank, 2, folder=folder):
        assert weights == pytest.approx(computed.device["master weights"], rel=0.01)
        assert moments == pytest.approx(computed.device["optimizer states"], rel=0.01)
    offloaded = rank_memory(model, training.model_copy(update={"offload": ("parameters",)}))
    assert not {"master weights", "gradients", "optimizer states"} & offloaded.device.keys()
    assert offloaded.host["master weights"] == computed.device["master weights"]


def policy_of(folder: Path, implementation: Implementation = "auto") -> Policy:
    model = ModelConfig(path=str(folder), max_context=1024, implementation=implementation)
    return Policy(model, TrainingConfig(row_tokens=1024), World())


def saved_bytes(policy: Policy, tokens: int) -> int:
    """Bytes that the layers save for the backward pass, excluding parameters."""
    own = {parameter.untyped_storage().data_ptr() for parameter in policy.model.parameters()}
    found: dict[int, int] = {}
    alive: list[torch.Tensor] = []  # so that addresses are not reused

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        alive.append(tensor)
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        ids, positions = torch.zeros(1, tokens, dtype=torch.long), torch.arange(tokens)[None]
        policy._decoder.hidden(ids, positions, layout_documents([Document(tokens)]))  # pyright: ignore[reportPrivateUsage]
    return sum(found.values())


@pytest.mark.parametrize("implementation", ["torchtitan", "transformers"])
@pytest.mark.parametrize("tokens", [256, 768])
def test_activation_memory_matches_estimate(folder: Path, implementation: Any, tokens: int) -> None:
    policy = policy_of(folder, implementation)
    source = DecoderSpec(json.dumps(config_of(folder)), implementation)
    computed = measure_activations(source, MicroBatchShape(1, tokens, tokens, gathers_documents=True)).kept
    assert saved_bytes(policy, tokens) == pytest.approx(computed, rel=0.05)


@pytest.mark.parametrize("name", ["lfm2", "qwen3_next", "mamba2", "mamba"])
def test_recurrent_activation_memory_matches_estimate(name: str, tmp_path: Path) -> None:
    folder = make_family(name, tmp_path / "model")
    policy = policy_of(folder)
    source = DecoderSpec(json.dumps(config_of(folder)), "transformers")
    computed = measure_activations(source, MicroBatchShape(1, 512, 512, gathers_documents=True)).kept
    assert saved_bytes(policy, 512) == pytest.approx(computed, rel=0.05)


def test_extrapolated_layers_match_running_all_layers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = DecoderSpec(json.dumps(config_of(folder) | {"num_hidden_layers": 6}), "torchtitan")
    shape = MicroBatchShape(1, 128, 128)
    monkeypatch.setattr("titan_rl.training.activation_memory.TRACED", 4)
    continued = measure_activations(source, shape)
    monkeypatch.setattr("titan_rl.training.activation_memory.TRACED", 6)
    assert continued.kept == pytest.approx(measure_activations(source, shape).kept, rel=1e-3)


def test_each_memory_saving_setting_reduces_its_component(folder: Path) -> None:
    hf = config_of(folder) | {"num_hidden_layers": 6}
    model = ModelConfig(path=str(folder), dtype="bfloat16")

    def part(name: str, **given: Any) -> int:
        training = TrainingConfig(data_parallel=2, kl_coef=0.1, **given)
        return rank_memory(model, training, hf=hf).device.get(name, 0)

    full = part("checkpointed activations", activation_checkpointing="full")
    selective = part("checkpointed activations", activation_checkpointing="selective")
    assert 0 < full < selective < part("activations")
    assert part("activations", rows_per_micro_batch=4) < 0.6 * part("activations")
    assert part("optimizer states", optimizer_dtype="int8") == part("optimizer states") // 4
    assert part("gradients", master_dtype="bfloat16") == part("gradients") // 2
    assert part("critic") == 0 < part("critic", critic="model") == part("master weights")
    assert part("reference model", offload=("reference",)) == 0 < part("reference model")


def test_longrope_memory_equals_plain_rope() -> None:
    plain = AutoConfig.for_model("phi3", num_hidden_layers=2, hidden_size=64, num_attention_heads=4, vocab_size=64,
                                 num_key_value_heads=2, intermediate_size=96, pad_token_id=0).to_dict()  # fmt: skip
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    scaled = plain | {"rope_parameters": rope, "original_max_position_embeddings": 4096}
    of_plain, of_scaled = (
        rank_memory(ModelConfig(path="tiny"), TrainingConfig(row_tokens=128), hf=hf) for hf in (plain, scaled)
    )
    assert of_scaled == of_plain


def test_rejects_incomplete_config_json_and_unsupported_families(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json"):
        rank_memory(ModelConfig(path=str(tmp_path)), TrainingConfig())
    hf = config_of(folder)
    del hf["num_hidden_layers"]
    with pytest.raises(ModelError, match="lacks 'num_hidden_layers'"):
        rank_memory(ModelConfig(path="tiny"), TrainingConfig(), hf=hf)
    with pytest.raises(ModelError, match="'rwkv' is refused"):
        rank_memory(ModelConfig(path="tiny"), TrainingConfig(), hf={"model_type": "rwkv"})

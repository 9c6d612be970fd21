"""Memory of one rank of the trainer, computed from a model's config.json and the settings. No weights are read.

Weights, gradients and optimizer states follow from the shapes of the parameters, which the model's own code declares
without memory. `activation_memory.py` computes what a forward and a backward pass keep. The memory of FSDP, optimizers
and publishing is computed by formulas in this file. Peaks on a CPU differ from these figures by at most 10% (`python -m
benchmarks.fit`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

from titan_rl.core.errors import ModelError
from titan_rl.training.activation_memory import DecoderSpec, MicroBatchShape, measure_activations
from titan_rl.training.models.families import EXPERT_COUNTS, TOP_KS, choose_implementation
from titan_rl.training.models.hf_model import read_hf_config
from titan_rl.training.settings import ModelConfig, TrainingConfig

BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}

SPLIT = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "moe_intermediate_size", "vocab_size")
"""Dimensions of config.json that are split over tensor-parallel ranks."""

UPDATE_BYTES = {"float32": 14, "bfloat16": 22, "int8": 41}
"""Temporary bytes per entry of the parameter that `CompactAdam` is updating, by the dtype of the moments: moments in
float32, divisor, random bits and codes. If weight and gradient are stored in bfloat16, their float32 copies need
another 8 bytes."""


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Peak memory of a rank.

    Attributes:
        device: Bytes by component in the GPU's memory or, on a CPU, in the process's memory.
        host: Bytes by component that `training.offload` keeps in the host's memory.
        at_rest: Bytes on the device between two steps.
        parameters: Number of parameters of the whole model.
        frozen: Bytes of the weights that an adapter leaves frozen.
    """

    device: dict[str, int]
    host: dict[str, int]
    at_rest: int
    parameters: int
    frozen: int = 0

    @property
    def total(self) -> int:
        return sum(self.device.values())

    @staticmethod
    def of_adapters(ranks: Sequence[RankMemory]) -> RankMemory:
        """Memory of a rank that trains several adapters in turn: the frozen weights once, the matrices and optimizer
        states of all adapters, and for every other component the largest need of one adapter."""
        device, host = _of_adapters([each.device for each in ranks]), _of_adapters([each.host for each in ranks])
        shared, frozen = len(ranks) - 1, ranks[0].frozen
        name = next(name for name in device if name.endswith("weights"))
        device[name] -= shared * frozen
        at_rest = sum(each.at_rest for each in ranks) - shared * frozen
        return RankMemory(device, host, at_rest, ranks[0].parameters, frozen)


def _of_adapters(parts: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Bytes by component: the sum over the adapters for components that each of them has, and the largest value for
    components of the adapter that is computing."""
    names = dict.fromkeys(name for part in parts for name in part)
    return {
        name: (sum if name in ("weights", "master weights", "optimizer states") else max)(
            part.get(name, 0) for part in parts
        )
        for name in names
    }


@dataclass(frozen=True, slots=True)
class Numbers:
    """Parameter counts of one rank. FSDP splits the first dimension of each parameter; "part" means the shard that this
    rank holds.

    Attributes:
        held: Parameters of the part.
        frozen: Parameters of the part that are not trained.
        matrices: Parameters of the part that are in trained matrices of the layers.
        total: Parameters that all FSDP ranks hold together, without the parts of other tensor-parallel ranks.
        layer: Parameters of the whole largest layer.
        embedding: Parameters of the whole embedding.
        is_tied: Whether the embedding is also the output layer.
        cast: Trained parameters that a forward pass under autocast converts, without the output layer.
        largest: Entries of the part of the largest parameter.
    """

    held: int
    frozen: int
    matrices: int
    total: int
    layer: int
    embedding: int
    is_tied: bool
    cast: int
    largest: int

    @property
    def trained(self) -> int:
        return self.held - self.frozen


@dataclass(frozen=True, slots=True)
class Declared:
    """A parameter of a model.

    Attributes:
        block: Index of the parameter's layer; -1 outside the layers.
    """

    shape: tuple[int, ...]
    is_trained: bool
    block: int


@lru_cache(maxsize=64)
def _declared(source: DecoderSpec) -> tuple[tuple[Declared, ...], tuple[int, ...], bool]:
    """All parameters, the shape of the embedding, and whether the embedding is also the output layer."""
    decoder = source.build()
    blocks = {id(each): at for at, block in enumerate(decoder.blocks.values()) for each in block.parameters()}
    parameters = tuple(
        Declared(tuple(each.shape), each.requires_grad, blocks.get(id(each), -1))
        for each in decoder.module.parameters()
    )
    return parameters, max((tuple(each.shape) for each in decoder.head.parameters()), key=prod), decoder.is_tied


def count_parameters(source: DecoderSpec, shards: int) -> Numbers:
    """Count the parameters of a model as its code declares them.

    Args:
        shards: Number of ranks that share each parameter by FSDP.
    """
    parameters, embedding, is_tied = _declared(source)
    layers: dict[int, int] = {}
    held = frozen = matrices = largest = total = cast = 0
    for each in parameters:
        size = prod(each.shape)
        part = -(-each.shape[0] // shards) * prod(each.shape[1:]) if each.shape else 1
        total += size
        held += part
        frozen += 0 if each.is_trained else part
        largest = max(largest, part)
        layers[each.block] = layers.get(each.block, 0) + size
        if each.is_trained and len(each.shape) >= 2 and each.block >= 0:
            cast += size
            matrices += part if len(each.shape) == 2 else 0
    return Numbers(
        held=held,
        frozen=frozen,
        matrices=matrices,
        total=total,
        layer=max(size for block, size in layers.items() if block >= 0),
        embedding=prod(embedding),
        is_tied=is_tied,
        cast=cast,
        largest=largest,
    )


def rank_memory(
    model: ModelConfig, training: TrainingConfig, *, device: str = "cuda", hf: Mapping[str, Any] | None = None
) -> RankMemory:
    """Peak memory of the trainer's rank that needs most, while it trains full rows in which every token is trained.

    Args:
        model: Settings of the model. Its folder needs only a config.json.
        device: "cuda" or "cpu"; they compute attention in different ways.
        hf: Content of config.json, if there is no folder.

    Raises:
        ModelError: The config.json is missing or lacks a dimension, or no implementation can train the model.
    """
    hf = read_hf_config(Path(model.path)) if hf is None else hf
    chosen = choose_implementation(
        hf,
        model.implementation,
        tensor_parallel=training.tensor_parallel,
        expert_parallel=training.expert_parallel,
        context_parallel=training.context_parallel,
        has_adapter=training.adapter.is_on,
    )
    is_alone = training.num_ranks == 1
    autocasts = is_alone and model.dtype != "float32"
    source = DecoderSpec(
        json.dumps(_split(hf, training.tensor_parallel), sort_keys=True),
        chosen.name,
        trained_dtype=training.master_dtype if is_alone else model.dtype,
        frozen_dtype=model.dtype,
        adapter_rank=training.adapter.rank,
        adapter_targets=training.adapter.targets,
    )
    numbers = count_parameters(source, training.data_parallel * training.context_parallel)
    shape = MicroBatchShape(
        rows=training.rows_per_micro_batch,
        row_tokens=training.row_tokens,
        context=min(model.max_context, training.row_tokens),
        ranks_a_row=training.context_parallel,
        gathers_documents=device == "cpu" or training.attention == "document",
        compute_dtype=model.dtype,
        autocasts=autocasts,
        checkpointing=training.activation_checkpointing,
    )
    if training.expert_parallel > 1:
        # A rank gathers only its own experts, and computes as many tokens with them as a rank that has all experts.
        own = _divided(hf, training.expert_parallel)
        source = replace(source, text=json.dumps(own, sort_keys=True))
        numbers = replace(numbers, layer=count_parameters(source, 1).layer)
    passes = measure_activations(source, shape)
    master, compute = BYTES[training.master_dtype], BYTES[model.dtype]
    weights = numbers.trained * master + numbers.frozen * compute
    at_host: dict[str, int] = {}
    on_device: dict[str, int] = {}
    offload = {*training.offload}
    state = at_host if "parameters" in offload else on_device
    of_optimizer = at_host if training.offloads_moments else on_device
    state["weights" if master == compute else "master weights"] = weights
    state["gradients"] = numbers.trained * master
    moments = _moments(training, numbers)
    of_optimizer["optimizer states"] = moments
    if training.critic == "model":  # gradients of critic and policy never exist at the same time
        state["critic"] = weights
        of_optimizer["critic's optimizer states"] = moments
    if training.kl_coef and not training.adapter.is_on:
        (at_host if "reference" in offload else on_device)["reference model"] = numbers.held * master
    at_rest = sum(on_device.values()) - on_device.get("gradients", 0)
    cast = numbers.cast * compute if autocasts and master != compute else 0
    kept = max(0, passes.kept - cast)  # checkpointing may keep some of the converted weights only
    if "activations" in offload:
        at_host["activations"], kept = kept, 0
    kept_name = "activations" if training.activation_checkpointing == "none" else "checkpointed activations"
    stages = [(passes.head, 0), (passes.layer, 0)]
    if not is_alone:
        stages = _gathered(numbers, passes.head, passes.layer, compute)
    work, gathered = max(stages, key=sum)
    within_passes = {
        f"weights in {model.dtype}": cast,
        "gathered layers": gathered,
        kept_name: kept,
        "logits and work space": work,
    }
    on_device |= {name: size for name, size in within_passes.items() if size}
    if (beyond := update_bytes(training, numbers.largest) - sum(within_passes.values())) > 0:
        on_device["update of the largest weight"] = beyond
    frozen = numbers.frozen * compute
    return RankMemory(on_device, at_host, at_rest, total_parameters(hf, chosen.name), frozen)


def adapter_parameters(model: ModelConfig, targets: tuple[str, ...]) -> int:
    """Number of parameters of an adapter of rank 1: in + out of each layer that it changes."""
    hf = read_hf_config(Path(model.path))
    chosen = choose_implementation(hf, model.implementation, has_adapter=True)
    source = DecoderSpec(json.dumps(dict(hf), sort_keys=True), chosen.name, adapter_rank=1, adapter_targets=targets)
    return count_parameters(source, 1).trained


def total_parameters(hf: Mapping[str, Any], implementation: Any) -> int:
    """Number of parameters of a whole model."""
    source = DecoderSpec(json.dumps(dict(hf), sort_keys=True), implementation)
    return count_parameters(source, 1).total


def _split(hf: Mapping[str, Any], ranks: int) -> dict[str, Any]:
    """Derive the config.json of the model that one tensor-parallel rank computes.

    Raises:
        ModelError: A dimension is not divisible by the number of ranks.
    """
    if ranks == 1:
        return dict(hf)
    made = dict(hf)
    made.setdefault("head_dim", hf["hidden_size"] // hf["num_attention_heads"])
    for name in SPLIT:
        if name in hf:
            if hf[name] % ranks and name != "vocab_size":
                raise ModelError(
                    f"training.tensor_parallel = {ranks} does not divide {name} = {hf[name]} of config.json; choose "
                    "one that does"
                )
            made[name] = -(-hf[name] // ranks)
    return made


def _divided(hf: Mapping[str, Any], ranks: int) -> dict[str, Any]:
    """Derive the config.json of a model with as many experts as one expert-parallel rank has, but at least as many as a
    token uses."""
    made = dict(hf)
    top_k = next((hf[name] for name in TOP_KS if hf.get(name)), 1)
    for name in EXPERT_COUNTS:
        if hf.get(name):
            made[name] = max(top_k, hf[name] // ranks)
    return made


def update_bytes(training: TrainingConfig, size: int) -> int:
    """Peak of the temporary bytes for the update of a parameter.

    Args:
        size: Number of entries of the parameter.
    """
    is_plain = training.optimizer_dtype == training.master_dtype == "float32" and not training.offloads_moments
    if training.optimizer not in ("adamw", "adam") or is_plain:
        return 0  # torch's fused optimizer; otherwise `CompactAdam`
    copies = 8 if training.master_dtype == "bfloat16" else 0
    copies += 16 if "parameters" in training.offload else 8 if "optimizer" in training.offload else 0
    return size * (UPDATE_BYTES[training.optimizer_dtype] + copies)


def _moments(training: TrainingConfig, numbers: Numbers) -> int:
    """Bytes of the optimizer states. A user's own optimizer is assumed to have two moments, as Adam has."""
    match training.optimizer:
        case "sgd":
            return numbers.trained * BYTES[training.master_dtype] if training.betas[0] else 0
        case "muon":
            return (2 * numbers.trained - numbers.matrices) * BYTES["float32"]
        case _:
            return 2 * numbers.trained * BYTES[training.optimizer_dtype]


def _gathered(numbers: Numbers, head: int, layer: int, compute: int) -> list[tuple[int, int]]:
    """(Work space, gathered weights and gradients) of FSDP in three stages of a backward pass, in bytes:

    - The output layer: its weights, and those of the last layer, which FSDP gathers ahead of time.
    - The sum of the output layer's gradient over the ranks: in the dtype of the computation, and in float32.
    - A layer: its weights and those of the next one, and its gradient in both dtypes. A tied embedding stays gathered,
      with its gradient.
    """
    outer, inner = numbers.embedding, numbers.layer
    tied = 2 * outer * compute if numbers.is_tied else 0
    return [
        (head, (outer + inner) * compute),
        (0, outer * (2 * compute + 4) + inner * compute),
        (layer, inner * (3 * compute + 4) + tied),
    ]

"""Memory of each GPU of a run, computed from config.json and the settings, and changes of settings that would make the
run fit.

Ranks are assigned to GPUs by `cluster/hosts/placement.py`, as if all GPUs were on one host.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any

from pydantic import ValidationError

from titan_rl.cluster.generator_actor import adapter_specs
from titan_rl.cluster.hosts.placement import choose_transport, place_generators, place_trainer
from titan_rl.config.model_folder import kv_bytes_per_token
from titan_rl.config.run import RunConfig
from titan_rl.config.sections import GenerationConfig
from titan_rl.core.errors import ConfigError, ModelError
from titan_rl.core.settings import Section
from titan_rl.generation.gpu_share import CPU_KV_GIB, GPU_SHARE, WORK_BYTES
from titan_rl.generation.vllm_arguments import adapter_slots, adapter_targets
from titan_rl.training.memory import BYTES, RankMemory, adapter_parameters, rank_memory
from titan_rl.weights.types import NUM_KEPT

GIB = 2**30

CONTEXT_BYTES = GIB
"""Estimate of the memory that CUDA and its libraries take in a trainer's process."""

TRAINER_ERROR = 0.09
"""Largest excess of a trainer's measured memory over the computed one, because of the allocator's fragmentation."""

HOST = "one host"


@dataclass(frozen=True, slots=True)
class GPUMemory:
    """Memory of one or several GPUs with equal content.

    Attributes:
        gpus: Numbers of the GPUs.
        trainer: Bytes of the trainer's rank, by component.
        engines: Bytes of the generators' ranks, by component.
        lends: Whether the engines use the GPU only while the trainer does not train, in addition to what the
            trainer holds between two steps.
        at_rest: Bytes of the trainer between two steps.
        contexts: Number of contexts of model.max_context tokens that the KV cache of each engine holds.
    """

    gpus: tuple[int, ...]
    trainer: Mapping[str, int] = field(default_factory=dict[str, int])
    engines: Mapping[str, int] = field(default_factory=dict[str, int])
    lends: bool = False
    at_rest: int = 0
    contexts: int = 0

    @property
    def total(self) -> int:
        return self._with(0.0)

    @property
    def at_most(self) -> int:
        """Bytes that the GPU may need, with the error of the computation."""
        return self._with(TRAINER_ERROR)

    def _with(self, error: float) -> int:
        trainer, engines = round((1 + error) * sum(self.trainer.values())), sum(self.engines.values())
        return max(trainer, round((1 + error) * self.at_rest) + engines) if self.lends else trainer + engines


@dataclass(frozen=True, slots=True)
class Saving:
    """A setting that saves memory.

    Attributes:
        bytes: Bytes saved on the fullest GPU.
        fits: Whether the run fits once the setting is changed.
    """

    setting: str
    value: Any
    bytes: int
    fits: bool

    def __str__(self) -> str:
        return f"{self.setting} = {_toml(self.value)}"


@dataclass(frozen=True, slots=True)
class Fit:
    """Memory of all GPUs.

    Attributes:
        parameters: Number of parameters of the model.
        host: Bytes of all ranks in the host's memory, by component.
        limit: Memory of a GPU in bytes.
    """

    parameters: int
    gpus: tuple[GPUMemory, ...]
    host: Mapping[str, int]
    limit: int

    @property
    def fullest(self) -> GPUMemory:
        return max(self.gpus, key=lambda each: each.at_most)

    @property
    def num_gpus(self) -> int:
        return sum(len(each.gpus) for each in self.gpus)

    @property
    def fits(self) -> bool:
        """Whether the run fits even if the trainer needs more than computed."""
        return self.fullest.at_most <= self.limit

    @property
    def may_fit(self) -> bool:
        """Whether the run fits by the computed figures."""
        return all(each.total <= self.limit for each in self.gpus)


def plan_memory(config: RunConfig, num_gpus: int, limit: int) -> Fit:
    """Compute the memory of each GPU.

    Args:
        limit: Memory of a GPU in bytes.

    Raises:
        ConfigError: The ranks need more GPUs than there are.
        ModelError: The memory of a rank cannot be computed; see `rank_memory`.
    """
    ranks = [rank_memory(config.model, each.training) for each in config.experiments.values()]
    rank = RankMemory.of_adapters(ranks) if ranks else rank_memory(config.model, config.training)
    return _fit_on(config, rank, num_gpus, limit)


def savings(config: RunConfig, before: Fit) -> list[Saving]:
    """Changes of single settings that save memory on the fullest GPU, the largest saving first."""
    found: list[Saving] = []
    for setting, value in _candidates(config, before):
        after = _try(config, setting, value, before)
        if after is not None and (saved := before.fullest.total - after.fullest.total) > before.limit // 200:
            found.append(Saving(setting, value, saved, after.fits))
    return sorted(found, key=lambda each: -each.bytes)


def smallest_change(config: RunConfig, before: Fit) -> tuple[list[Saving], Fit]:
    """Find changes of settings that together make a run fit. Changes that cost the least speed are tried first, and
    those that turn out not to be needed are left out. If no changes suffice, the result has all that
    save memory.

    Returns:
        The changes, and the memory with them.
    """
    found: dict[str, Saving] = {}
    changed, fit = config, before
    progress = True
    while progress and not fit.fits:
        progress = False
        # Engines first take the GPUs that they need, because the trainer's ranks take all others.
        for candidates in (_splits, _candidates):
            for setting, value in candidates(changed, fit):
                after = None if fit.fits else _try(changed, setting, value, before)
                if after is None or (saved := _excess(fit) - _excess(after)) <= before.limit // 200:
                    continue
                changed, fit, progress = with_setting(changed, setting, value), after, True
                found.pop(setting, None)
                found[setting] = Saving(setting, _value(changed, setting), saved, after.fits)
    chosen = list(found.values())
    if fit.fits:
        for saving in list(chosen[:-1]):
            others = [each for each in chosen if each is not saving]
            if (after := _try_all(config, others, before)) is not None and after.fits:
                chosen, fit = others, after
    return chosen, fit


def _excess(fit: Fit) -> int:
    """Bytes beyond the limit: on the fullest GPU with a rank of the trainer, plus on the fullest other GPU.

    A setting of the trainer therefore counts as a help even if engines on their own GPUs exceed the limit by more, and
    vice versa.
    """
    fullest = (
        max((each.at_most for each in fit.gpus if bool(each.trainer) is has), default=0) for has in (True, False)
    )
    return sum(max(0, each - fit.limit) for each in fullest)


def _value(config: RunConfig, setting: str) -> Any:
    value: Any = config
    for name in setting.split("."):
        value = getattr(value, name)
    return value


def _splits(config: RunConfig, before: Fit) -> Iterator[tuple[str, Any]]:
    """Changes of the number of GPUs that share an engine's weights."""
    for size in (2, 4, 8):
        if config.generation.tensor_parallel_size < size <= before.num_gpus:
            yield "generation.tensor_parallel_size", size


def _candidates(config: RunConfig, before: Fit) -> Iterator[tuple[str, Any]]:
    """Changes of settings that may save memory, those that cost the least speed first."""
    num_gpus = before.num_gpus
    model, training, generation = config.model, config.training, config.generation
    if training.rows_per_micro_batch > 1:
        yield "training.rows_per_micro_batch", 1
    if training.row_tokens > model.max_context:
        yield "training.row_tokens", model.max_context
    if model.dtype == "float32":
        yield "model.dtype", "bfloat16"
    taken = generation.num_generators * generation.tensor_parallel_size
    apart = max(0, num_gpus - taken) // training.ranks_a_row  # ranks on GPUs that the generators leave to the trainer
    if apart > training.data_parallel:
        yield "training.data_parallel", apart
    if training.activation_checkpointing != "full":
        yield "training.activation_checkpointing", "full"
    if training.expert_parallel == 1:
        ranks = training.data_parallel * training.context_parallel
        yield from (("training.expert_parallel", size) for size in (2, 4, 8) if ranks % size == 0)
    if generation.kv_cache_gib is not None:
        beyond = (before.fullest.total - before.limit) / GIB
        less = max(CPU_KV_GIB, float(int(generation.kv_cache_gib - beyond / _engines_on(before.fullest, generation))))
        if less < generation.kv_cache_gib:
            yield "generation.kv_cache_gib", less
    if generation.num_generators > 1 and generation.num_generators_range is None:
        yield "generation.num_generators", 1
    yield from _splits(config, before)
    if (ranks := num_gpus // training.ranks_a_row) > max(apart, training.data_parallel):  # takes KV cache from engines
        yield "training.data_parallel", ranks
    for name in ("bfloat16", "int8"):
        if BYTES[name] < BYTES[training.optimizer_dtype]:
            yield "training.optimizer_dtype", name
    if training.master_dtype == "float32":
        yield "training.master_dtype", "bfloat16"
    for part in ("reference", "optimizer", "parameters", "activations"):
        if part not in training.offload:
            kept = tuple(each for each in training.offload if part != "parameters" or each != "optimizer")
            yield "training.offload", (*kept, part)
    for size in (2, 4, 8):
        if size <= num_gpus // training.data_parallel and training.ranks_a_row == 1:
            yield "training.context_parallel", size
    if not (training.adapter.is_on or config.adapters):
        yield "training.adapter.rank", 16


def with_setting(config: RunConfig, setting: str, value: Any) -> RunConfig:
    """Copy a config with another value for one setting of [model], [training] or [generation].

    Raises:
        ValidationError: The value contradicts another setting.
    """
    table, *names = setting.split(".")
    section: Section = getattr(config, table)
    for name in reversed(names[1:]):
        value = {name: value}
    given = {name: getattr(section, name) for name in section.model_fields_set}
    if setting == "training.offload":  # adds to the parts that are already offloaded
        parts = dict.fromkeys((*given.get("offload", ()), *value))
        value = tuple(part for part in parts if part != "optimizer" or "parameters" not in parts)
    made = type(section).model_validate({**given, names[0]: value})
    return config.model_copy(update={table: made})


def _try(config: RunConfig, setting: str, value: Any, before: Fit) -> Fit | None:
    """Memory with another value of a setting; None if the run cannot have that value."""
    try:
        changed = with_setting(config, setting, value)
        if changed.training.master_dtype == "bfloat16" and changed.model.dtype != "bfloat16":
            return None
        if "parameters" in changed.training.offload and changed.training.num_ranks == 1:
            return None
        if changed.adapters and changed.training.num_ranks > 1:
            return None
        return plan_memory(changed, before.num_gpus, before.limit)
    except (ValidationError, ConfigError, ModelError):
        return None


def _try_all(config: RunConfig, chosen: Sequence[Saving], before: Fit) -> Fit | None:
    try:
        for each in chosen[:-1]:
            config = with_setting(config, each.setting, each.value)
    except ValidationError:
        return None
    return _try(config, chosen[-1].setting, chosen[-1].value, before) if chosen else None


def _fit_on(config: RunConfig, rank: RankMemory, num_gpus: int, limit: int) -> Fit:
    gpus = {HOST: [str(number) for number in range(num_gpus)]}
    trainer = place_trainer(config.training, [HOST], gpus)
    generators = place_generators(config.generation, [HOST], gpus, trainer)
    transport = config.statedict.transport
    if transport == "auto":
        transport, _ = choose_transport(config, trainer, generators, lambda: limit, parameters=rank.parameters)
    num_versions = NUM_KEPT + config.validates_beside_training  # a validation alongside training holds one more version
    published = num_versions * _published(config, rank) // config.training.num_ranks
    of_trainer = {**rank.device, "CUDA": CONTEXT_BYTES}
    host = {name: size * config.training.num_ranks for name, size in rank.host.items()}
    if transport == "cuda_ipc":
        of_trainer["published versions"] = published
    else:
        host["published versions"] = published * config.training.num_ranks
    trains = {gpu for place in trainer for gpu in place.gpus}
    engines = [{gpu for place in ranks for gpu in place.gpus} for ranks in generators]
    lends = config.scheduling.on_batch_ready == "sleep"
    alike: dict[tuple[bool, int], list[int]] = {}
    for number, name in enumerate(gpus[HOST]):
        alike.setdefault((name in trains, sum(name in each for each in engines)), []).append(number)
    found: list[GPUMemory] = []
    for (is_trainer, count), numbers in alike.items():
        engines_here = _engines(config, rank.parameters, count, limit, beside_trainer=is_trainer)
        found.append(
            GPUMemory(
                tuple(numbers),
                of_trainer if is_trainer else {},
                engines_here,
                lends and is_trainer,
                rank.at_rest + CONTEXT_BYTES if is_trainer else 0,
                engines_here.get("KV cache", 0) // max(1, count * _context_bytes(config)),
            )
        )
    return Fit(rank.parameters, tuple(found), host, limit)


def _engines_on(gpu: GPUMemory, generation: GenerationConfig) -> int:
    """Number of engines on a GPU, at least 1."""
    cache = int((generation.kv_cache_gib or 0) * GIB)
    return max(1, round(gpu.engines.get("KV cache", 0) / cache)) if cache else 1


def _published(config: RunConfig, rank: RankMemory) -> int:
    """Bytes of a published version: of the whole model, or of all adapters."""
    adapters = adapter_specs(config).values()
    parameters = sum(each.rank * adapter_parameters(config.model, tuple(each.targets)) for each in adapters)
    return (parameters if adapters else rank.parameters) * BYTES[config.model.dtype]


def _context_bytes(config: RunConfig) -> int:
    """Bytes of a whole context in the KV cache of one rank of an engine."""
    token = kv_bytes_per_token(config.model) or 0
    return -(-token // config.generation.tensor_parallel_size) * config.model.max_context


def _engines(config: RunConfig, parameters: int, count: int, limit: int, *, beside_trainer: bool) -> dict[str, int]:
    """Bytes of the engines' ranks on a GPU, by component.

    Args:
        count: Number of engines on the GPU.
        limit: Memory of the GPU in bytes.
    """
    if not count or config.generation.engine != "vllm":
        return {}
    generation = config.generation
    weights = ceil(parameters * BYTES[config.model.dtype] / generation.tensor_parallel_size)
    adapters = _adapters(config)
    if generation.kv_cache_gib is not None:
        cache = int(generation.kv_cache_gib * GIB)
    elif beside_trainer and generation.gpu_share is None:
        cache = int(CPU_KV_GIB * GIB)
    else:
        share = generation.gpu_share if generation.gpu_share is not None else GPU_SHARE / count
        cache = int(limit * share) - weights - adapters - WORK_BYTES
    return {
        "engine weights": count * weights,
        **({"engine adapters": count * adapters} if adapters else {}),
        "KV cache": count * max(cache, _context_bytes(config)),
        "engine work space": count * WORK_BYTES,
    }


def _adapters(config: RunConfig) -> int:
    """Most bytes that a rank of an engine reserves for adapters. Tensor-parallel ranks may need less, because they
    share a part of the adapters."""
    adapters = adapter_specs(config).values()
    if not adapters:
        return 0
    num_slots, rank = adapter_slots(adapters)
    parameters = adapter_parameters(config.model, tuple(adapter_targets(adapters)))
    return num_slots * rank * parameters * BYTES[config.model.dtype]


def _toml(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return f'"{value}"' if isinstance(value, str) else str(value)

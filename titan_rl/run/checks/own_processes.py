"""Processes of a run on this machine: their places, threads and priority, and whether the machine has room for them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from titan_rl.cluster.hosts.cores import (
    describe_trainer_threads,
    plural,
    threads_each,
    usable_cores,
    usable_memory,
)
from titan_rl.cluster.hosts.placement import ProcessPlace, place_generators, place_trainer, visible_gpus
from titan_rl.config.hosts import Roles
from titan_rl.config.model_files import read_json
from titan_rl.config.run import RunConfig
from titan_rl.generation.gpu_share import planned_kv_gib
from titan_rl.training.models.families import EXPERT_COUNTS

HERE = "this machine"

MOST_PER_CORE = 8
"""Number of processes per core above which a run is warned of."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Resources of this machine that a run may use."""

    gpus: tuple[str, ...]
    cores: int
    memory: int  # bytes

    @classmethod
    def here(cls) -> Machine:
        return cls(visible_gpus(), usable_cores(), usable_memory())


def describe_processes(config: RunConfig, machine: Machine) -> Iterator[str]:
    """Describe where a run's processes are placed, their threads and their priority, with the reasons, in one line for
    each.

    Example: "generators: 2 engines without a GPU, with 1 thread each, because engines and trainer share 2 cores"
    """
    if config.hosts.elsewhere:
        yield from _describe_hosts(config)
        return
    gpus = {HERE: machine.gpus}
    trainer = place_trainer(config.training, [HERE], gpus)
    generators = place_generators(config.generation, [HERE], gpus, trainer)
    engines = [place for ranks in generators for place in ranks]
    ranks, engines_of = plural(len(trainer), "rank"), plural(len(generators), "engine")
    if not machine.gpus:
        yield f"trainer: {ranks} without a GPU, because this machine has none"
        yield describe_trainer_threads(len(trainer), machine.cores, _prevents_threads(config))
        yield (
            f"generators: {engines_of} without a GPU, with {plural(threads_each(), 'thread')} each, "
            + (
                f"because OMP_NUM_THREADS is set to {os.environ['OMP_NUM_THREADS']}"
                if "OMP_NUM_THREADS" in os.environ
                else f"because engines and trainer share {plural(machine.cores, 'core')}"
            )
        )
    else:
        yield f"trainer: {ranks} on {_gpus(trainer)}, because each rank has its own GPU, the first ones"
        is_apart = {place.gpus for place in trainer}.isdisjoint((gpu,) for place in engines for gpu in place.gpus)
        size = config.generation.tensor_parallel_size
        why = (
            "which the trainer leaves"
            if is_apart
            else f"shared with the trainer, because it leaves less than {plural(size, 'GPU')}, the size of an engine"
        )
        yield f"generators: {engines_of} on {_gpus(engines)}, {why}"
    yield (
        f"priority: nice {os.nice(0)} for all processes, as for this one, because trainer and generators wait for each "
        "other during a step"
    )


def memory_problem(config: RunConfig, machine: Machine) -> str | None:
    """Describe why no generator can start on this machine; None if nothing prevents it."""
    kv_gib = _kv_gib(config, machine)
    if kv_gib is None or kv_gib * 2**30 <= machine.memory:
        return None
    return (
        f"generation.kv_cache_gib = {kv_gib:g} is more than the memory of this machine, "
        f"{machine.memory / 2**30:.1f} GiB, so no generator can start; lower it"
    )


def overloads(config: RunConfig, machine: Machine) -> Iterator[str]:
    """Warn about processes of a run that need more than this machine has, with one line for each kind of resource."""
    if config.hosts.elsewhere:
        return
    kv_gib, generators = _kv_gib(config, machine), config.generation.num_generators
    if kv_gib is not None and kv_gib * 2**30 <= machine.memory < generators * kv_gib * 2**30:
        yield (
            f"generation.num_generators = {generators} KV caches of generation.kv_cache_gib = {kv_gib:g} need "
            f"{generators * kv_gib:g} GiB, and this machine has {machine.memory / 2**30:.1f} GiB; lower either"
        )
    cores, ranks, workers = machine.cores, config.training.num_ranks, config.rollout.num_workers
    engines = generators * config.generation.tensor_parallel_size
    total = ranks + engines + workers
    if total > MOST_PER_CORE * cores:
        yield (
            f"{plural(ranks, 'trainer rank')}, {plural(engines, 'generator rank')} and "
            f"{plural(workers, 'rollout worker')} are on {plural(cores, 'core')} of this machine, and more than "
            f"{MOST_PER_CORE} processes per core may be too slow to start; lower {_setting_of(ranks, engines, workers)}"
        )


def _prevents_threads(config: RunConfig) -> str:
    """Reason for which a trainer process computes one micro-batch at a time; empty if there is none."""
    architecture = read_json(Path(config.model.path), "config.json")
    experts = "experts of the model" if any(architecture.get(name) for name in EXPERT_COUNTS) else ""
    return config.training.prevents_threads or experts


def _setting_of(ranks: int, engines: int, workers: int) -> str:
    """Setting that determines most of the processes."""
    counts = {"training.data_parallel": ranks, "generation.num_generators": engines, "rollout.num_workers": workers}
    return max(counts, key=lambda name: counts[name])


def _kv_gib(config: RunConfig, machine: Machine) -> float | None:
    """Size of the KV cache of one engine in the memory of this machine; None if it is elsewhere or unknown."""
    if config.hosts.elsewhere or machine.gpus or config.generation.engine != "vllm":
        return None
    return planned_kv_gib(config.generation.kv_cache_gib)


def _describe_hosts(config: RunConfig) -> Iterator[str]:
    known = ""
    if config.hosts.addresses:
        roles = Roles.of(config.hosts, config.hosts.addresses)
        known = f"; {', '.join(roles.train)} trains, and {', '.join(roles.generate)} generates"
    yield f"processes get their GPUs and cores when the hosts have answered, because they are not known before{known}"


def _gpus(places: Sequence[ProcessPlace]) -> str:
    """Names of the GPUs of places: "GPU 0", or "GPUs 1, 2"."""
    names = sorted({gpu for place in places for gpu in place.gpus}, key=lambda name: (len(name), name))
    return f"GPU{'' if len(names) == 1 else 's'} {', '.join(names)}"

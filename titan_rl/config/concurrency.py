"""Concurrency of a run: requests in flight and requests running per engine, sized by the batch and bounded by the KV
cache.

If a batch has more requests than the engines run at a time, some of them wait in the engines' queues, unnoticed.
Therefore the number of requests that an engine runs at a time follows from the slots of the scheduler, unless
`generation.max_running` is set, and there are warnings, with numbers, about settings that throttle a run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from titan_rl.config.model_folder import kv_bytes_per_token
from titan_rl.config.run import RunConfig
from titan_rl.config.sections import GenerationConfig
from titan_rl.generation.gpu_share import planned_kv_gib
from titan_rl.training.settings import ModelConfig

STEP = 8
"""Multiple to which numbers of running requests are rounded, because engines prepare their kernels for such batches."""


@dataclass(frozen=True, slots=True)
class Concurrency:
    """Number of requests in flight for training, and number that the engines run.

    Example: 32 slots of 8 rollouts on 2 generators need to run 128 requests each.
    """

    in_flight: int  # most rollouts in flight
    wanted: int  # running requests of one engine with which no request waits
    held: int | None  # contexts of half the maximum length that fit one engine's KV cache; None if unknown
    max_running: int  # running requests of one engine, at most

    @classmethod
    def of(cls, config: RunConfig) -> Concurrency:
        """Compute the concurrency from the settings, without changing them."""
        generation, group_size = config.generation, config.rollout.group_size
        in_flight = config.scheduling.num_slots * group_size
        if (limit := config.scheduling.max_running_rollouts) is not None:
            in_flight = min(in_flight, max(limit, group_size))
        wanted = STEP * math.ceil(in_flight / generation.num_generators / STEP)
        return cls(
            in_flight=in_flight,
            wanted=wanted,
            held=contexts_held(config.model, generation),
            max_running=max_running_of(config.model, generation, wanted),
        )


def engine_max_running(config: RunConfig) -> int:
    """Number of requests, of all experiments of a run, that one engine runs at a time."""
    wanted = sum(Concurrency.of(each).wanted for each in config.experiments.values() or [config])
    return max_running_of(config.model, config.generation, wanted)


def contexts_held(model: ModelConfig, generation: GenerationConfig) -> int | None:
    """Number of contexts of half the maximum length that fit the KV cache of one engine; None if the model is unknown,
    or if the cache takes the free memory of a GPU."""
    token_bytes, kv_gib = kv_bytes_per_token(model), planned_kv_gib(generation.kv_cache_gib)
    if token_bytes is None or kv_gib is None:
        return None
    # A context grows to its full length while it runs, so on average it takes half of that.
    return max(1, int(2 * kv_gib * 2**30 / token_bytes / model.max_context))


def max_running_of(model: ModelConfig, generation: GenerationConfig, wanted: int) -> int:
    """Number of requests that one engine runs at a time: the setting's value, or otherwise the wanted number as far as
    the KV cache holds it. An adaptive engine ("auto") itself determines how many the cache holds."""
    if generation.max_running == "auto":
        return wanted
    if generation.max_running is not None:
        return generation.max_running
    held = contexts_held(model, generation)
    return wanted if held is None else min(wanted, max(held - held % STEP, min(held, STEP)))


def describe_concurrency(config: RunConfig) -> Iterator[str]:
    """Describe the concurrency of a run, with one line for each figure.

    Example:

        256 rollouts in flight: 32 slots of the scheduler x rollout.group_size = 8
        generation.max_running is 128, on each of 2 generators
        the KV cache of a generator holds 2,048 contexts of half of model.max_context = 256 tokens
    """
    sized = Concurrency.of(config)
    limit = config.scheduling.max_running_rollouts
    limited = "" if limit is None else f", limited by scheduling.max_running_rollouts = {limit}"
    yield (
        f"{sized.in_flight:,} rollouts in flight: {config.scheduling.num_slots} slots of the scheduler x "
        f"rollout.group_size = {config.rollout.group_size}{limited}"
    )
    at_most = "auto, at most " if config.generation.max_running == "auto" else ""
    yield (
        f"generation.max_running is {at_most}{sized.max_running}, on each of {config.generation.num_generators} "
        "generators"
    )
    if sized.held is not None:
        yield (
            f"the KV cache of a generator holds {sized.held:,} contexts of half of model.max_context = "
            f"{config.model.max_context} tokens"
        )
    elif planned_kv_gib(config.generation.kv_cache_gib) is None:
        yield "the KV cache of a generator uses the free memory of its GPU (generation.kv_cache_gib)"


def throttles(config: RunConfig) -> Iterator[str]:
    """Warn about settings that make rollouts wait or ranks idle, with one line for each, which has the numbers and the
    fix."""
    sized = Concurrency.of(config)
    scheduling, generation, training = config.scheduling, config.generation, config.training
    group_size = config.rollout.group_size
    step_rollouts = scheduling.groups_per_step * group_size
    groups_at_once = scheduling.groups_per_step // min(training.minibatches, scheduling.groups_per_step)
    if (at_once := groups_at_once * group_size) < training.data_parallel:
        yield (
            f"training.data_parallel = {training.data_parallel} ranks share an optimizer step of as few as {at_once} "
            f"rollouts (scheduling.groups_per_step = {scheduling.groups_per_step} x rollout.group_size = "
            f"{group_size} in training.minibatches = {training.minibatches}), so that ranks idle; lower it to "
            f"{at_once}, or raise scheduling.groups_per_step"
        )
    if (limit := scheduling.max_running_rollouts) is not None and limit < step_rollouts:
        yield (
            f"scheduling.max_running_rollouts = {limit} is less than the {step_rollouts} rollouts of one step "
            f"(scheduling.groups_per_step = {scheduling.groups_per_step} x rollout.group_size = {group_size}), "
            "which run in several rounds; raise it, or leave it out"
        )
    max_running = sized.max_running * generation.num_generators
    if generation.max_running is not None and max_running < sized.in_flight:
        yield (
            f"generation.max_running = {generation.max_running} on {generation.num_generators} generators runs "
            f"{max_running} of {sized.in_flight} rollouts in flight ({scheduling.num_slots} slots x "
            f"rollout.group_size = {group_size}), and the others wait in the engines; set it to {sized.wanted}, or "
            "leave it out"
        )
    running = sized.wanted if generation.max_running is None else min(sized.max_running, sized.wanted)
    if sized.held is not None and sized.held < running:
        kv_gib = planned_kv_gib(generation.kv_cache_gib) or 0.0
        need = 1.01 * kv_gib * running / sized.held  # still enough after rounding
        yield (
            f"generation.kv_cache_gib = {kv_gib:g} holds {sized.held} contexts of half of "
            f"model.max_context = {config.model.max_context}, and {running} rollouts are in flight on each generator, "
            f"so some of them wait or are recomputed; raise it to {need:.3g}, or lower "
            "scheduling.max_running_rollouts"
        )

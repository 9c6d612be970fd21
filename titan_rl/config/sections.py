"""The settings of a run, one class per TOML table. Checked before any process starts; checking changes nothing.

The docstring under a field is its line in `titan-rl train --help`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)
from pydantic_core import PydanticCustomError

from titan_rl.config.providers import ON_SEVERAL_HOSTS
from titan_rl.config.speculative import SpeculativeConfig
from titan_rl.config.suites import ValidationSuite
from titan_rl.core.settings import FunctionName, Section, TakesEffect
from titan_rl.generation.registry import BY_NAME as ENGINES
from titan_rl.generation.router.registry import BY_NAME as STRATEGIES
from titan_rl.weights.transports.registry import BY_NAME as TRANSPORTS

STREAM_INTERVAL = 32
"""`generation.stream_interval` of a run that does not say."""


def _number_or_auto(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    try:
        return check(value)
    except ValidationError as error:
        raise PydanticCustomError("number_or_auto", 'must be a number above 0 or "auto"') from error


class GenerationConfig(Section):
    """The generator actors and their engines."""

    engine: Annotated[str, FunctionName(tuple(ENGINES), ("spec",))] = "vllm"
    """What continues prompts in each of them."""
    num_generators: PositiveInt = 2
    """Generator actors, one engine each."""
    least_generators: PositiveInt = 1
    """While fewer are in service the run waits for more, hosts.wait_s at most."""
    most_generators: Annotated[PositiveInt | None, ON_SEVERAL_HOSTS] = None
    """As hosts join a run, it gets no more than these. By default each host brings as many as the others have."""
    tensor_parallel_size: PositiveInt = 1
    """Processes that share the model of one generator; it divides the model's attention heads."""
    max_running: Annotated[PositiveInt | Literal["auto"], WrapValidator(_number_or_auto)] | None = None
    """Most requests one engine advances at a time. By default its share of the rollouts in flight, which are those of
    all slots of the scheduler, or fewer if kv_cache_gib does not hold so many at half of the longest context. "auto" is
    that share, and from step to step as many as the KV cache is expected to hold, by how long requests get."""
    kv_cache_gib: PositiveFloat | None = None
    """Memory of one engine's KV cache; it holds at least one full context. By default 1 on a CPU and beside a trainer
    on the same GPU; elsewhere what weights and work space leave of gpu_share, or of 0.9 of the GPU, shared evenly by
    the engines that are on it."""
    gpu_share: float | None = Field(default=None, gt=0, le=1)
    """Share of a GPU's memory for one process of an engine, which does not start if less is free. By default what
    weights, KV cache and work space add up to. Experimental."""
    return_routed_experts: bool = False
    """Training completions tell which experts each token took. For mixtures of experts, on GPUs."""
    pull_mode: Literal["hot_swap", "drain"] = "hot_swap"
    """New weights are loaded between two tokens of running requests, or once a generator's requests have finished."""
    running_kv: Annotated[Literal["keep", "recompute"], TakesEffect("generation.pull_mode", one_of=("hot_swap",))] = (
        "keep"
    )
    """At a hot swap running requests keep the KV cache of the old weights, or compute it anew."""
    prefix_cache: bool = True
    """Requests reuse the KV cache of others that begin with the same tokens."""
    reset_prefix_cache: Annotated[bool, TakesEffect("generation.prefix_cache", one_of=(True,))] = True
    """With new weights later requests reuse no KV cache of the old ones."""
    stream_interval: PositiveInt | None = None
    """Engine steps between two messages of new tokens to the router, which goes on from those if a generator dies. By
    default 32, and 1 where `titan-rl serve` streams to clients."""
    stall_timeout_s: PositiveFloat = 300.0
    """A generator from which nothing comes for so long while requests wait there hangs, and is replaced. Neither long
    answers nor queues count as long as some token comes, nor does time in which generation is paused."""
    start_timeout_s: PositiveFloat | None = None
    """Longest wait for an engine, a trainer or a rollout worker to start. By default 180 s and a second for every 100
    MB of weights in the model's folder: 780 s for 30B in bfloat16."""
    max_respawns: NonNegativeInt = 3
    """Generators that may die and be replaced before the run ends; 0 ends it with the first."""
    speculative: SpeculativeConfig = SpeculativeConfig()
    vllm: dict[str, Any] = Field(default_factory=dict)
    """Options for vLLM, by the names of its EngineArgs: {max_num_batched_tokens = 16384}. What other settings say, and
    what titan_rl sets itself, is refused."""


class RoutingConfig(Section):
    """How a request finds its replica."""

    strategy: Annotated[str, FunctionName(tuple(STRATEGIES), ("max_sessions",))] = "sticky"
    """sticky keeps a rollout on the replica that holds its KV cache; group_affinity also starts its siblings there."""
    max_sessions: Annotated[
        PositiveInt, TakesEffect("routing.strategy", none_of=("consistent_hash", "least_loaded", "round_robin"))
    ] = 65536
    """Sessions remembered; the one longest unused is forgotten first. At least as many as rollouts in flight."""
    move_below: Annotated[float, Field(gt=0, lt=1)] | None = None
    """A generator with at most this part of the requests of the fullest takes some over, with their tokens, which are
    computed anew there. By default none move; not with requests that are seeded."""


class SamplingConfig(Section):
    """How completions are sampled for training. The loss accounts for temperature alone, so nothing else is offered."""

    max_tokens: PositiveInt = 64
    """Most tokens of one completion."""
    temperature: PositiveFloat = 1.0
    """Of the distribution that is sampled from and trained on."""
    seeded: bool | None = None
    """Every request is sampled with a seed of its own, so that a run can be repeated; on GPUs that takes vLLM a kernel
    a request and step. By default only where scheduling.max_staleness = 0 without oversample: no other run repeats."""


_TCP = TakesEffect("statedict.transport", none_of=("shared_memory", "rdma", "cuda_ipc"), fix='set that to "tcp"')


_NOT_SHARED_MEMORY = TakesEffect(
    "transport_may_be_tcp",
    one_of=(True,),
    without="on one machine",
    fix='set hosts.addresses or hosts.provider, or statedict.transport to "tcp",',
)


class StateDictConfig(Section):
    """How every published version travels to the generators, and how they verify it."""

    transport: Annotated[str, FunctionName(tuple(TRANSPORTS), ("spec",))] = "auto"
    """By default tcp on several hosts, cuda_ipc where vLLM and the trainer have GPUs of their own on one and there is
    room, and else shared_memory; --dry-run says which, and why. With tcp each host is sent a version once, by the host
    before it, and of most versions what changed; with rdma each generator reads the trainer's memory over the network.
    With cuda_ipc all are on GPUs of one host, and read from the trainer's GPU memory, which has two more copies
    then. Between hosts, and with rdma or cuda_ipc, it is experimental."""
    fanout: Annotated[PositiveInt, _TCP, ON_SEVERAL_HOSTS] = 1
    """With tcp, hosts that each host sends a version to: 1 makes a chain of them, in which the trainer sends it once,
    and more a tree."""
    anchor_interval: Annotated[PositiveInt, _TCP, _NOT_SHARED_MEMORY] = 16
    """With tcp, every so many versions all bytes are sent, and of the others only what changed, also to a host that
    missed some since the last of these; 1 always sends all."""
    num_probes: NonNegativeInt | None = None
    """Sequences whose logprobs the trainer publishes with each version; 0 verifies nothing. By default 4 in float32 and
    32 in bfloat16."""
    tolerance: Annotated[PositiveFloat | None, TakesEffect("statedict.num_probes", none_of=(0,))] = None
    """Largest mean logprob difference of a probe; by default 1e-5 in float32 and 0.1 in bfloat16."""
    pull_timeout_s: PositiveFloat = 120.0
    """Longest wait for a generator to load a version."""


_VALIDATED = TakesEffect("validation.num_prompts", none_of=(0,), fix="set that above 0")


class ValidationConfig(Section):
    """A fixed held-out set, run before, during and after training."""

    num_prompts: NonNegativeInt = 64
    """Held-out samples; 0 validates never."""
    samples_per_prompt: Annotated[PositiveInt, _VALIDATED] = 4
    """Rollouts of each; the reward is their mean."""
    temperature: Annotated[NonNegativeFloat, _VALIDATED] = 1.0
    """0 is greedy."""
    interval: Annotated[NonNegativeInt, _VALIDATED] = 0
    """Steps between validations; 0 validates only before and after."""
    suites: Annotated[tuple[ValidationSuite, ...], _VALIDATED] = Field(default=(), strict=False)
    """By default one of each task of the run."""


class CheckpointConfig(Section):
    """What is saved, and how often."""

    interval: NonNegativeInt = 0
    """Steps between checkpoints; 0 saves by time and at the end."""
    interval_s: NonNegativeFloat = 600.0
    """Seconds from one checkpoint to the next, or 9 times what the last one took if that is more; 0 saves by steps."""
    keep: PositiveInt = 2
    """Most checkpoints kept; the oldest goes first."""

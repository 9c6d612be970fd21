"""Tables of a run's settings, one class each, checked before any process starts. Checking changes no value.

The docstring under a field is its description in `--help`, in `titan-rl settings` and in the reference.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from titan_rl.config.tasks import ValidationSuite
from titan_rl.core.settings import FilePath, FunctionName, PathText, Section, TakesEffect
from titan_rl.generation.registry import BY_NAME as ENGINES
from titan_rl.generation.router.strategies import BY_NAME as STRATEGIES
from titan_rl.training.choices import Level
from titan_rl.weights.transports.registry import BY_NAME as TRANSPORTS

MOST_GUESSED = 128
"""Tokens that vLLM checks at a time, at most: MAX_SPEC_LEN of its rejection sampler."""

WITH_MODEL = ("draft_model", "eagle", "eagle3")


_LOOKS_UP = TakesEffect("generation.speculative.method", one_of=("ngram",))


class SpeculativeConfig(Section):
    """Tokens that an engine guesses, and checks several of at a time with the policy, which decides what is sampled:
    the distribution stays the policy's. The names are those of vLLM's speculative_config."""

    method: Literal["none", "ngram", "suffix", "draft_model", "eagle", "eagle3", "mtp"] = "none"
    """What guesses. ngram looks for the last tokens earlier in the same text, suffix in other answers, too; draft_model
    is a small model of its own; eagle, eagle3 and mtp are heads on the policy, whose weights training does not move."""
    num_speculative_tokens: PositiveInt = Field(default=3, le=MOST_GUESSED)
    """Guessed at a time, at most; vLLM checks no more than 128."""
    model: FilePath | None = None
    """Folder of what guesses, on every host: of draft_model, eagle and eagle3."""
    prompt_lookup: Annotated[tuple[PositiveInt, PositiveInt], _LOOKS_UP] = Field(default=(2, 4), strict=False)
    """Fewest and most tokens that ngram looks for; it begins with the most."""

    @property
    def is_on(self) -> bool:
        return self.method != "none"

    @property
    def has_weights(self) -> bool:
        """It guesses by weights, which an engine loads once."""
        return self.method not in ("none", "ngram", "suffix")

    def options(self) -> dict[str, Any] | None:
        """Speculative-decoding options in vLLM's format; None where nothing is speculated."""
        if not self.is_on:
            return None
        options: dict[str, Any] = {"method": self.method, "num_speculative_tokens": self.num_speculative_tokens}
        if self.method == "ngram":
            options["prompt_lookup_min"], options["prompt_lookup_max"] = self.prompt_lookup
        if self.method in WITH_MODEL:
            options["model"] = self.model
        return options

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.method in WITH_MODEL and self.model is None:
            raise ValueError(f'method = "{self.method}" needs model, the folder of what guesses')
        if self.method not in WITH_MODEL and self.model is not None:
            raise ValueError(
                f'model is for method = "{WITH_MODEL[0]}", "{WITH_MODEL[1]}" or "{WITH_MODEL[2]}", and method is '
                f'"{self.method}"; leave it out'
            )
        usual = type(self).model_fields["num_speculative_tokens"].default
        if not self.is_on and self.num_speculative_tokens != usual:
            raise ValueError(
                f'num_speculative_tokens = {self.num_speculative_tokens} with method = "none": nothing is guessed; set '
                "method, or leave it out"
            )
        if self.prompt_lookup[0] > self.prompt_lookup[1]:
            raise ValueError(f"prompt_lookup = {list(self.prompt_lookup)}: the fewest tokens come first")
        return self


STREAM_INTERVAL = 32
"""`generation.stream_interval` of a run that does not say."""


def _number_or_auto(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    try:
        return check(value)
    except ValidationError as error:
        raise PydanticCustomError("number_or_auto", 'must be a number above 0 or "auto"') from error


def _flag_or_keep(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    try:
        return check(value)
    except ValidationError as error:
        raise PydanticCustomError("flag_or_keep", 'must be true, false or "keep"') from error


class GenerationConfig(Section):
    """The generator actors and their engines."""

    engine: Annotated[str, FunctionName(tuple(ENGINES), ("spec",))] = "vllm"
    """What continues prompts in each of them."""
    num_generators: PositiveInt = 2
    """Generator actors, one engine each."""
    num_generators_range: tuple[PositiveInt, PositiveInt] | None = Field(default=None, strict=False)
    """Fewest and most generators: [2, 8]. While fewer are in service the run waits for more, for at most hosts.wait_s;
    hosts that join bring no more. By default the fewest is 1, and each host that joins brings as many as the others
    have."""
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
    pull_mode: Literal["hot_swap", "recompute", "drain"] = "hot_swap"
    """Loading of new weights: hot_swap between two tokens of running requests, which keep their KV cache; recompute at
    the same moment, and running requests recompute it; drain once a generator's requests have finished."""
    prefix_cache: Annotated[bool | Literal["keep"], WrapValidator(_flag_or_keep)] = True
    """Requests reuse the KV cache of others that begin with the same tokens, until new weights are loaded; with "keep"
    also that of older weights."""
    stream_interval: PositiveInt | None = None
    """Engine steps between two messages of new tokens to the router, which goes on from those if a generator dies. By
    default 32, and 1 where `titan-rl serve` streams to clients."""
    stall_timeout_s: PositiveFloat = 300.0
    """A generator from which nothing comes for so long while requests wait there hangs, and is replaced. Neither long
    answers nor queues count as long as some token comes, nor does time in which generation is paused."""
    start_timeout_s: PositiveFloat | None = None
    """Longest wait for an engine, a trainer or a rollout worker to start. By default 180 s and a second for every 100
    MB of weights in the model's folder: 780 s for 30B in bfloat16."""
    speculative: SpeculativeConfig = SpeculativeConfig()
    vllm: dict[str, Any] = Field(default_factory=dict)
    """Options for vLLM, by the names of its EngineArgs: {max_num_batched_tokens = 16384}. What other settings say, and
    what titan_rl sets itself, is refused."""

    @property
    def least_generators(self) -> int:
        return self.num_generators_range[0] if self.num_generators_range else 1

    @property
    def most_generators(self) -> int | None:
        return self.num_generators_range[1] if self.num_generators_range else None

    @model_validator(mode="after")
    def _begins_within_the_range(self) -> Self:
        if self.num_generators_range is not None:
            least, most = self.num_generators_range
            if not least <= self.num_generators <= most:
                raise ValueError(
                    f"num_generators = {self.num_generators} is not in num_generators_range = [{least}, {most}]; the "
                    "run begins with num_generators"
                )
        return self


class RoutingConfig(Section):
    """Settings of the router, which assigns requests to replicas."""

    strategy: Annotated[str, FunctionName(tuple(STRATEGIES), ("max_sessions",))] = "sticky"
    """sticky keeps a rollout on the replica that holds its KV cache; group_affinity also starts its siblings there."""
    move_below: Annotated[float, Field(gt=0, lt=1)] | None = None
    """A generator with at most this part of the requests of the fullest takes some over, with their tokens, which are
    computed anew there. By default none move; not with requests that are seeded."""


class SamplingConfig(Section):
    """Sampling of completions for training. The loss accounts for temperature alone, so nothing else is offered."""

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
    """Transport of published versions to the generators, and their verification."""

    transport: Annotated[str, FunctionName(tuple(TRANSPORTS), ("spec",))] = "auto"
    """By default tcp on several hosts, cuda_ipc where vLLM and the trainer have GPUs of their own on one and there is
    room, and else shared_memory; --dry-run says which, and why. With tcp each host is sent a version once, by the host
    before it, and of most versions what changed; with rdma each generator reads the trainer's memory over the network.
    With cuda_ipc all are on GPUs of one host, and read from the trainer's GPU memory, which has two more copies
    then. Between hosts, and with rdma or cuda_ipc, it is experimental."""
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
    """Content and interval of checkpoints."""

    interval: NonNegativeInt = 0
    """Steps between checkpoints; 0 saves by time and at the end."""
    interval_s: NonNegativeFloat = 600.0
    """Seconds from one checkpoint to the next, or 9 times what the last one took if that is more; 0 saves by steps."""
    keep: PositiveInt = 2
    """Most checkpoints kept; the oldest goes first."""


class TinyModelConfig(Section):
    """The model that is made where `sft.start` names none."""

    level: Level = "word"
    """byte: a token for each byte. word: also one for each word of the demonstrations, and for phrases that many of
    them have."""
    parameters: PositiveInt = 1_000_000
    """How many it has, about."""


class SFTConfig(Section):
    """Supervised training on demonstrations, which makes the model at `model.path`. What the table lacks is as in
    [training]: optimizer, rows, several processes."""

    start: PathText = ""
    """Hugging Face folder of the model that is taught. By default a tiny one is made for the demonstrations."""
    tiny_model: TinyModelConfig = TinyModelConfig()
    """The model that is made where `start` names none."""
    out: PathText = ""
    """Folder that the taught model is written to at the end. By default model.path."""
    data: PathText = ""
    """Where demonstrations come from: a file of chats in JSON lines, or the folder of a run, of which the best rollouts
    are taken. By default what the task demonstrates."""
    top_k: Annotated[PositiveInt, TakesEffect("sft.data", none_of=("",), fix="set that to the folder of a run")] = 1
    """Most rollouts of each group of a run, those with the highest rewards."""
    min_reward: float | None = None
    """Rollouts of a run below this reward are left out. By default none are."""
    demonstrations: PositiveInt = 4096
    """Most that are taken."""
    held_out: NonNegativeInt = 64
    """Demonstrations that are not learned, on which the loss is measured; at most a tenth of them."""
    steps: PositiveInt | None = None
    """Optimizer steps. By default as many as the epochs have."""
    epochs: Annotated[PositiveInt, TakesEffect("sft.steps", one_of=(None,))] = 1
    """How often each demonstration is learned, where `steps` does not say it."""
    batch_size: Annotated[
        PositiveInt, TakesEffect("sft.batch_tokens", one_of=(None,), fix="leave sft.batch_tokens out")
    ] = 32
    """Demonstrations in one optimizer step."""
    batch_tokens: PositiveInt | None = None
    """Tokens in one optimizer step, at most, in place of `batch_size`."""
    shuffle: bool = True
    """Each epoch has an order of its own. Else it is that of the source."""
    lr: PositiveFloat = 2e-3
    """Highest learning rate. The default is for tiny models."""
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Learning rate at the last step relative to `lr`, to which it falls as a cosine; 1 keeps it constant."""
    weight_decay: NonNegativeFloat = 0.01
    """Weight decay of the optimizer."""
    interval: Annotated[NonNegativeInt, TakesEffect("sft.held_out", none_of=(0,), fix="set that above 0")] = 50
    """Steps between measurements of the held-out loss; 0 measures before and after."""

    @model_validator(mode="after")
    def _data_is_of_one_kind(self) -> Self:
        if not self.data and self.min_reward is not None:
            raise ValueError(
                f"min_reward = {self.min_reward:g} chooses rollouts of a run; set data to its folder, or leave it out"
            )
        return self

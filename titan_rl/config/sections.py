"""The settings of a run, one class per TOML table. Checked before any process starts; checking changes nothing.

The docstring under a field is its line in `titan-rl train --help`.
"""

from __future__ import annotations

import math
from typing import Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)


class Section(BaseModel):
    """Base of every table: frozen, strict about types, finite, and closed to unknown keys.

    An integer is fine where a float is asked for; nothing else is converted.
    """

    model_config = ConfigDict(
        frozen=True, strict=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )


class ModelConfig(Section):
    """The policy."""

    path: str
    """Hugging Face folder: config.json, safetensors, tokenizer and chat template."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the weights, in the trainer and in the engines."""
    max_context: PositiveInt = 512
    """Most tokens of prompt and completion together."""


class GenerationConfig(Section):
    """The generator actors and their engines."""

    num_generators: PositiveInt = 2
    """Generator actors, one engine each."""
    tensor_parallel_size: PositiveInt = 1
    """Processes that share the model of one generator; it divides the model's attention heads."""
    max_running: PositiveInt | None = None
    """Most requests one engine advances at a time. By default its share of the rollouts in flight, which are those of
    all slots of the scheduler, or fewer if kv_cache_gib does not hold so many."""
    kv_cache_gib: PositiveFloat = 1.0
    """Memory of one engine's KV cache; it holds at least one full context."""
    return_routed_experts: bool = False
    """Training completions tell which experts each token took. For mixtures of experts, on GPUs."""
    pull_mode: Literal["hot_swap", "drain"] = "hot_swap"
    """New weights are loaded between two tokens of running requests, or once a generator's requests have finished."""
    running_kv: Literal["keep", "recompute"] = "keep"
    """At a hot swap running requests keep the KV cache of the old weights, or compute it anew."""
    reset_prefix_cache: bool = True
    """With new weights later requests reuse no KV cache of the old ones."""
    stream_interval: PositiveInt = 32
    """Engine steps between two messages of new tokens to the router, which goes on from those if a generator dies."""
    stall_timeout_s: PositiveFloat = 300.0
    """A generator from which nothing comes for so long while requests wait there hangs, and is replaced. Neither long
    answers nor queues count as long as some token comes, nor does time in which generation is paused."""
    start_timeout_s: PositiveFloat = 180.0
    """Longest wait for an engine to come up."""
    max_respawns: NonNegativeInt = 3
    """Generators that may die and be replaced before the run ends; 0 ends it with the first."""


class RoutingConfig(Section):
    """How a request finds its replica."""

    strategy: Literal["sticky", "group_affinity", "consistent_hash", "least_loaded", "round_robin"] = "sticky"
    """sticky keeps a rollout on the replica that holds its KV cache; group_affinity also starts its siblings there."""
    max_sessions: PositiveInt = 65536
    """Sessions remembered; the one longest unused is forgotten first."""


class SamplingConfig(Section):
    """How completions are sampled for training. The loss accounts for temperature alone, so nothing else is offered."""

    max_tokens: PositiveInt = 64
    """Most tokens of one completion."""
    temperature: PositiveFloat = 1.0
    """Of the distribution that is sampled from and trained on."""


class RolloutConfig(Section):
    """Groups of sibling rollouts and their limits."""

    group_size: int = Field(default=8, ge=2)
    """Rollouts of one sample; each is judged against its siblings."""
    max_turns: PositiveInt = 8
    """Completions of one rollout."""
    rollout_timeout_s: PositiveFloat = 300.0
    """Time that one rollout may use itself: its environment's, and that of its requests while they run, not while they
    queue or are interrupted. It then ends with the answers it has, as truncated."""
    generate_timeout_s: PositiveFloat = 7200.0
    """Longest time of one completion, interruptions included."""
    env_timeout_s: PositiveFloat = 60.0
    """Longest time of one call into the environment."""
    env_in_thread: bool = False
    """Each environment runs in a thread of its own. For those that block: a time limit then has an effect on them."""
    judge_grace_s: NonNegativeFloat = 10.0
    """While generation is paused, rewards being computed have this long; they are then cancelled and begun anew."""
    num_workers: NonNegativeInt = 0
    """Processes that play rollouts, where environments or scoring take much computing; 0 plays in the controller."""
    max_retries: NonNegativeInt = 0
    """Siblings of one group that are played again after an error other than of parsing, in fresh environments."""
    max_respawns: NonNegativeInt = 3
    """Rollout workers that may die and be replaced before the run ends; 0 ends it with the first."""


class SchedulingConfig(Section):
    """Which groups run now, how stale they may be, and what becomes of the long tail."""

    groups_per_step: PositiveInt = 16
    """Groups trained on in one optimizer step."""
    max_staleness: NonNegativeInt = 1
    """Optimizer steps between the weights that sampled a token and the step it is trained in. 0 is on-policy."""
    oversample: NonNegativeFloat = 0.0
    """Groups that run beyond those needed, as a share of groups_per_step, rounded up; the first to finish go first."""
    window: PositiveInt | None = None
    """A finished group overtakes an unfinished one by fewer places than this. By default 1, which is data order, or
    with oversample as many as run for a step."""
    on_batch_ready: Literal["continue", "keep", "abort"] = "continue"
    """While a batch is trained and pulled, generation goes on, is frozen with its KV cache, or leaves the engines."""
    tail: Literal["carry_over", "tail_batch", "drop"] = "carry_over"
    """Unfinished groups that a batch overtook run on, wait until groups_per_step of them do, or are dropped by age."""
    tail_age: PositiveInt = 1
    """With tail = "drop": versions pulled since its admission at which an unfinished group is dropped."""
    max_token_age: NonNegativeInt | None = None
    """Tokens older than so many versions are context and not trained. By default all are trained."""
    max_running_rollouts: PositiveInt | None = None
    """Most rollouts in flight; a group starts when all its siblings fit. By default as many as the groups have."""
    suspend_timeout_s: PositiveFloat = 3600.0
    """Longest time that a rollout waits while its group or all generation is interrupted."""
    filters: tuple[Literal["zero_variance"], ...] = Field(default=(), strict=False)
    """Finished groups that are not trained on, beside those with fewer than two siblings left."""
    max_refills: PositiveInt = 4
    """A step whose groups are all filtered is refilled this often before the run stops."""
    max_failed_groups: PositiveInt = 8
    """Groups in a row that may be lost to errors before the run stops with the most frequent."""

    @property
    def num_oversampled(self) -> int:
        """Groups that run beyond those needed."""
        return math.ceil(self.oversample * self.groups_per_step)

    @property
    def num_slots(self) -> int:
        """Groups admitted and not yet trained on, at most: (S+1)P and the oversampled."""
        return (self.max_staleness + 1) * self.groups_per_step + self.num_oversampled

    @property
    def overtaking_window(self) -> int:
        return self.window or (self.groups_per_step + self.num_oversampled if self.num_oversampled else 1)

    @property
    def age_bound(self) -> int:
        """Most versions between the one that sampled a token and the one that the step on it starts from.

        With B slots and a window of W places, at most B - 1 groups hold a slot before a group that is admitted, and at
        most W - 1 overtake it: it is trained at most (B + W - 2) // P steps after the version it was admitted at.
        """
        return (self.num_slots + self.overtaking_window - 2) // self.groups_per_step


class StateDictConfig(Section):
    """How every published version is verified by the generators that pull it."""

    transport: Literal["shared_memory", "rdma", "cuda_ipc"] = "shared_memory"
    """Generators are on the trainer's host; with rdma they may be elsewhere, too, and read over the network there. With
    cuda_ipc all are on GPUs of one host, and read from the trainer's GPU memory, which has two more copies then."""
    num_probes: NonNegativeInt = 4
    """Sequences whose logprobs the trainer publishes with each version; 0 verifies nothing."""
    tolerance: PositiveFloat | None = None
    """Largest mean logprob difference of a probe; by default 1e-5 in float32 and 0.1 in bfloat16."""
    pull_timeout_s: PositiveFloat = 120.0
    """Longest wait for a generator to load a version."""


class ValidationConfig(Section):
    """A fixed held-out set, played before, during and after training."""

    num_prompts: NonNegativeInt = 64
    """Held-out samples; 0 validates never."""
    samples_per_prompt: PositiveInt = 4
    """Rollouts of each; the reward is their mean."""
    temperature: NonNegativeFloat = 1.0
    """0 is greedy."""
    interval: NonNegativeInt = 0
    """Steps between validations; 0 validates only before and after."""


class CheckpointConfig(Section):
    """What is saved, and how often."""

    interval: NonNegativeInt = 0
    """Steps between checkpoints; 0 saves by time and at the end."""
    interval_s: NonNegativeFloat = 600.0
    """Seconds from one checkpoint to the next, or 9 times what the last one took if that is more; 0 saves by steps."""
    keep: PositiveInt = 2
    """Most checkpoints kept; the oldest goes first."""


class LoggingConfig(Section):
    """Where metrics go beside the run directory."""

    wandb: bool = False
    """Log to Weights & Biases."""
    wandb_project: str = "titan_rl"
    """Project to log to."""
    tensorboard: bool = False
    """Write TensorBoard events into the run directory."""
    transcripts_per_step: NonNegativeInt = 4
    """Groups a step whose rollouts are written to rollouts.jsonl."""

"""The settings of a run, one class per TOML table. Checked before any process starts; checking changes nothing.

The docstring under a field is its line in `titan-rl train --help`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from titan_rl.types import SamplingParams

Beta = Annotated[float, Field(ge=0, lt=1)]


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
    engine: Literal["vllm"] = "vllm"
    """What runs the model."""
    max_running: PositiveInt = 64
    """Most requests one engine advances at a time."""
    kv_cache_gib: PositiveFloat = 1.0
    """Memory of one engine's KV cache; it holds at least one full context."""
    stream_interval: PositiveInt = 32
    """Engine steps between two messages of new tokens to the router, which goes on from those if a generator dies."""
    request_timeout_s: PositiveFloat = 300.0
    """Longest wait for one completion."""
    start_timeout_s: PositiveFloat = 180.0
    """Longest wait for an engine to come up."""
    max_respawns: NonNegativeInt = 3
    """Generators that may die and be replaced before the run ends; 0 ends it with the first."""


class RoutingConfig(Section):
    """How a request finds its replica."""

    strategy: Literal["sticky", "least_loaded", "round_robin"] = "sticky"
    """sticky keeps a rollout on the replica that holds its KV cache, else takes the least loaded."""
    max_sessions: PositiveInt = 65536
    """Sessions remembered; the one longest unused is forgotten first."""


class SamplingConfig(Section):
    """How completions are sampled for training. The loss accounts for temperature alone, so nothing else is offered."""

    max_tokens: PositiveInt = 64
    """Most tokens of one completion."""
    temperature: PositiveFloat = 1.0
    """Of the distribution that is sampled from and trained on."""

    def params(self) -> SamplingParams:
        return SamplingParams(max_tokens=self.max_tokens, temperature=self.temperature)


class RolloutConfig(Section):
    """Groups of sibling rollouts and their limits."""

    group_size: int = Field(default=8, ge=2)
    """Rollouts of one sample; each is judged against its siblings."""
    max_turns: PositiveInt = 8
    """Completions of one rollout."""
    rollout_timeout_s: PositiveFloat = 300.0
    """Longest time of one rollout."""
    env_timeout_s: PositiveFloat = 60.0
    """Longest time of one call into the environment."""


class SchedulingConfig(Section):
    """Which groups run now, and how stale they may be."""

    groups_per_step: PositiveInt = 16
    """Groups trained on in one optimizer step."""
    max_staleness: NonNegativeInt = 1
    """Optimizer steps between the weights that sampled a token and the step it is trained in. 0 is on-policy."""
    max_refills: PositiveInt = 4
    """A step whose groups are all filtered is refilled this often before the run stops."""


class TrainingConfig(Section):
    """The optimizer and the loss."""

    steps: PositiveInt = 100
    """Optimizer steps of the run."""
    lr: PositiveFloat = 3e-4
    """Highest learning rate."""
    warmup_steps: NonNegativeInt = 0
    """Steps over which the learning rate rises linearly to `lr`."""
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1)
    """Learning rate at the last step relative to `lr`; the decay from one to the other is `lr_decay`."""
    lr_decay: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate after the warm-up, over the run's own steps."""
    betas: tuple[Beta, Beta] = Field(default=(0.9, 0.95), strict=False)  # TOML has lists, no tuples
    """AdamW's decay rates of the first and second moment."""
    weight_decay: NonNegativeFloat = 0.0
    """AdamW's decoupled weight decay."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradients with a larger norm are scaled down to it."""
    clip_low: float = Field(default=0.2, gt=0, le=1)
    """The policy ratio is clipped below 1 - clip_low."""
    clip_high: PositiveFloat = 0.28
    """The policy ratio is clipped above 1 + clip_high."""
    advantage: Literal["standardized", "group_mean"] = "standardized"
    """Reward minus the group's mean; standardized also divides by the group's standard deviation."""
    row_tokens: PositiveInt = 1024
    """Tokens in one packed row; at least `model.max_context`, so that every sample fits."""
    rows_per_micro_batch: PositiveInt = 8
    """Packed rows in one forward and backward pass."""


class StateDictConfig(Section):
    """How every published version is verified by the generators that pull it."""

    num_probes: NonNegativeInt = 4
    """Sequences whose logprobs the trainer publishes with each version; 0 verifies nothing."""
    tolerance: PositiveFloat | None = None
    """Largest mean logprob difference of a probe; by default 1e-5 in float32 and 0.1 in bfloat16."""
    pull_timeout_s: PositiveFloat = 120.0
    """Longest wait for a generator to load a version."""


class ValidationConfig(Section):
    """A fixed held-out set, played before, during and after training."""

    num_prompts: PositiveInt = 64
    """Held-out samples."""
    samples_per_prompt: PositiveInt = 4
    """Rollouts of each; the reward is their mean."""
    temperature: NonNegativeFloat = 1.0
    """0 is greedy."""
    interval: NonNegativeInt = 0
    """Steps between validations; 0 validates only before and after."""


class CheckpointConfig(Section):
    """What is saved, and how often."""

    interval: NonNegativeInt = 0
    """Steps between checkpoints; 0 saves only at the end."""
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

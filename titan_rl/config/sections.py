"""The settings of a run, one class per TOML table. Checked before any process starts; checking changes nothing."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from titan_rl.types import SamplingParams


class Section(BaseModel):
    """Base of every table: frozen, strict about types, and closed to unknown keys."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


class ModelConfig(Section):
    """The policy."""

    path: str
    """Hugging Face folder: config.json, safetensors, tokenizer and chat template."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    max_context: PositiveInt = 512
    """Most tokens of prompt and completion together."""


class GenerationConfig(Section):
    """The generator actors and their engines."""

    num_generators: PositiveInt = 2
    engine: Literal["vllm"] = "vllm"
    max_running: PositiveInt = 64
    """Most requests one engine advances at a time."""
    kv_cache_gib: PositiveFloat = 1.0
    tensor_parallel_size: PositiveInt = 1
    request_timeout_s: PositiveFloat = 300.0
    start_timeout_s: PositiveFloat = 180.0


class RoutingConfig(Section):
    """How a request finds its replica."""

    strategy: Literal["sticky", "least_loaded", "round_robin"] = "sticky"
    max_sessions: PositiveInt = 65536


class SamplingConfig(Section):
    """How completions are sampled for training. The loss accounts for temperature alone, so nothing else is offered."""

    max_tokens: PositiveInt = 64
    temperature: PositiveFloat = 1.0

    def params(self) -> SamplingParams:
        return SamplingParams(max_tokens=self.max_tokens, temperature=self.temperature)


class RolloutConfig(Section):
    """Groups of sibling rollouts and their limits."""

    group_size: PositiveInt = 8
    max_turns: PositiveInt = 8
    rollout_timeout_s: PositiveFloat = 300.0
    env_timeout_s: PositiveFloat = 60.0


class SchedulingConfig(Section):
    """Which groups run now, and how stale they may be."""

    groups_per_step: PositiveInt = 16
    max_staleness: NonNegativeInt = 1
    """Optimizer steps between the weights that sampled a token and the step it is trained in. 0 is on-policy."""
    max_refills: PositiveInt = 4
    """A step whose groups are all filtered is refilled this often before the run stops."""


class TrainingConfig(Section):
    """The optimizer and the loss."""

    steps: PositiveInt = 100
    lr: PositiveFloat = 3e-4
    warmup_steps: NonNegativeInt = 0
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1)
    """Learning rate at the last step relative to `lr`; the decay from one to the other is `lr_decay`."""
    lr_decay: Literal["constant", "linear", "cosine"] = "constant"
    betas: tuple[float, float] = Field(default=(0.9, 0.95), strict=False)
    weight_decay: NonNegativeFloat = 0.0
    max_grad_norm: PositiveFloat = 1.0
    clip_low: PositiveFloat = 0.2
    clip_high: PositiveFloat = 0.28
    advantage: Literal["standardized", "group_mean"] = "standardized"
    row_tokens: PositiveInt = 1024
    """Tokens in one packed row; samples longer than this are dropped with a metric."""
    rows_per_micro_batch: PositiveInt = 8


class StateDictConfig(Section):
    """How every published version is verified by the generators that pull it."""

    num_probes: NonNegativeInt = 4
    tolerance: PositiveFloat | None = None
    """Largest logprob difference; by default 1e-5 in float32 and 0.1 in bfloat16."""
    pull_timeout_s: PositiveFloat = 120.0


class ValidationConfig(Section):
    """A fixed held-out set, played before, during and after training."""

    num_prompts: PositiveInt = 64
    samples_per_prompt: PositiveInt = 4
    temperature: NonNegativeFloat = 1.0
    """0 is greedy."""
    interval: NonNegativeInt = 0
    """Steps between validations; 0 validates only before and after."""


class CheckpointConfig(Section):
    """What is saved, and how often."""

    interval: NonNegativeInt = 0
    """Steps between checkpoints; 0 saves only at the end."""
    keep: PositiveInt = 2


class LoggingConfig(Section):
    """Where metrics go beside the run directory."""

    wandb: bool = False
    wandb_project: str = "titan_rl"
    tensorboard: bool = False
    transcripts_per_step: NonNegativeInt = 4
    """Groups a step whose rollouts are written to rollouts.jsonl."""

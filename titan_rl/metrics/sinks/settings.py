"""Settings of the table [logging]: metric sinks, transcripts and traces."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from titan_rl.core.settings import FunctionName, Section, TakesEffect

NAMES = ("wandb", "tensorboard", "trackio", "prometheus")
"""Sinks of the library, see `titan_rl.metrics.sinks.registry`."""


class WandbConfig(Section):
    """Weights & Biases, where `logging.sinks` names wandb."""

    project: str = "titan_rl"
    """Project to log to."""
    entity: str | None = None
    """User or team; by default yours."""
    group: str | None = None
    """Group of runs that belong together."""
    tags: tuple[str, ...] = Field(default=(), strict=False)
    """Tags of the run."""
    mode: Literal["online", "offline"] | None = None
    """offline needs no login, and writes to the run's folder for `wandb sync`. Defaults to WANDB_MODE."""


class TensorBoardConfig(Section):
    """TensorBoard events in `tensorboard/` of the run's folder, where `logging.sinks` names tensorboard."""

    flush_s: PositiveFloat = 10.0
    """Seconds between writes to the disk."""


class TrackioConfig(Section):
    """trackio, where `logging.sinks` names it."""

    project: str = "titan_rl"
    """Project to log to."""
    space: str | None = None
    """Hugging Face Space, `user/name`, that shows the runs. By default `trackio show` shows them on this machine."""


class PrometheusConfig(Section):
    """Endpoint /metrics that Prometheus scrapes, where `logging.sinks` names prometheus."""

    host: str = "127.0.0.1"
    """Address that it listens on. It requires no key: anybody who can reach it can read the metrics."""
    port: int = Field(default=9464, ge=0, le=65535)
    """Port that it listens on; 0 takes a free port, which is reported."""


class LoggingConfig(Section):
    """Metric sinks besides metrics.jsonl of the run's folder, which is always written; transcripts and traces."""

    sinks: tuple[Annotated[str, FunctionName(NAMES, ("spec",))], ...] = Field(default=(), strict=False)
    """Metric sinks, such as ["wandb", "trackio"]. Each has a table of its own options, for instance `[logging.wandb]`.
    A function of yours takes a `titan_rl.metrics.sinks.types.SinkSpec` and returns a `MetricSink`."""
    transcripts_per_step: NonNegativeInt = 4
    """Groups per step whose rollouts are written to rollouts.jsonl."""
    transcript_tokens: bool = True
    """Also write the tokens of these rollouts, each with its text and logprob: about 30 bytes per token."""
    trace: bool = True
    """Write a timeline of each process to trace/ of the run's folder, for `titan-rl view` and Perfetto."""
    trace_mib: Annotated[PositiveInt, TakesEffect("logging.trace", one_of=(True,))] = 32
    """Largest trace of a process in MiB: a few hundred steps of single environment calls, which are dropped first, and
    many thousand steps of other events."""
    wandb: Annotated[WandbConfig, TakesEffect("logging.sinks", one_of=("wandb",))] = WandbConfig()
    tensorboard: Annotated[TensorBoardConfig, TakesEffect("logging.sinks", one_of=("tensorboard",))] = (
        TensorBoardConfig()
    )
    trackio: Annotated[TrackioConfig, TakesEffect("logging.sinks", one_of=("trackio",))] = TrackioConfig()
    prometheus: Annotated[PrometheusConfig, TakesEffect("logging.sinks", one_of=("prometheus",))] = PrometheusConfig()

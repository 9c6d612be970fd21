"""The table [logging]: where metrics go beside the run's folder."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from titan_rl.core.settings import FunctionName, Section, TakesEffect

NAMES = ("wandb", "tensorboard", "trackio", "prometheus")
"""The library's own sinks, see `titan_rl.metrics.sinks.registry`."""


class WandbConfig(Section):
    """Weights & Biases, where `logging.sinks` names wandb."""

    project: str = "titan_rl"
    """Project to log to."""
    entity: str | None = None
    """User or team; by default yours."""
    group: str | None = None
    """Runs that belong together."""
    tags: tuple[str, ...] = Field(default=(), strict=False)
    """Of the run."""
    mode: Literal["online", "offline"] | None = None
    """offline needs no login, and writes to the run's folder for `wandb sync`; by default what WANDB_MODE says."""


class TensorBoardConfig(Section):
    """TensorBoard events in `tensorboard/` of the run's folder, where `logging.sinks` names tensorboard."""

    flush_s: PositiveFloat = 10.0
    """Seconds between writes to the disk."""


class TrackioConfig(Section):
    """trackio, where `logging.sinks` names it."""

    project: str = "titan_rl"
    """Project to log to."""
    space: str | None = None
    """A Hugging Face Space, `user/name`, that shows the runs; by default they are shown here, by `trackio show`."""


class PrometheusConfig(Section):
    """An endpoint /metrics that Prometheus scrapes, where `logging.sinks` names prometheus."""

    host: str = "127.0.0.1"
    """Address that it listens on. Whoever reaches it reads the metrics: it asks for no key."""
    port: int = Field(default=9464, ge=0, le=65535)
    """Port that it listens on; 0 takes one that is free, which is told."""


class LoggingConfig(Section):
    """Where metrics go beside the run's folder, which always has them in metrics.jsonl."""

    sinks: tuple[Annotated[str, FunctionName(NAMES, ("spec",))], ...] = Field(default=(), strict=False)
    """Each has a table of options of its own, `[logging.wandb]` for instance. Several are a list: ["wandb", "trackio"].
    A function of yours makes a `MetricSink` of a `titan_rl.metrics.sinks.types.SinkSpec`."""
    transcripts_per_step: NonNegativeInt = 4
    """Groups a step whose rollouts are written to rollouts.jsonl."""
    transcript_tokens: bool = True
    """Write the tokens of these rollouts, too, each with its text and logprob: about 30 bytes a token."""
    trace: bool = True
    """Write what each process does when into trace/ of the run's folder, for `titan-rl view` and Perfetto."""
    trace_mib: Annotated[PositiveInt, TakesEffect("logging.trace", one_of=(True,))] = 32
    """Most MiB of a process's trace: some hundred steps of single environment calls, which go first, and many thousand
    of the rest."""
    wandb: Annotated[WandbConfig, TakesEffect("logging.sinks", one_of=("wandb",))] = WandbConfig()
    tensorboard: Annotated[TensorBoardConfig, TakesEffect("logging.sinks", one_of=("tensorboard",))] = (
        TensorBoardConfig()
    )
    trackio: Annotated[TrackioConfig, TakesEffect("logging.sinks", one_of=("trackio",))] = TrackioConfig()
    prometheus: Annotated[PrometheusConfig, TakesEffect("logging.sinks", one_of=("prometheus",))] = PrometheusConfig()

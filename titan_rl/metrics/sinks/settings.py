"""Settings of the table [logging]: metric sinks, transcripts and traces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, Field, NonNegativeInt

from titan_rl.core.settings import FunctionName, Section, TakesEffect, refusal

NAMES = ("wandb", "tensorboard", "trackio", "prometheus")
"""Names of the library's sinks; see `titan_rl.metrics.sinks.registry`."""


def _options(names: Sequence[str]) -> AfterValidator:
    """Validator of a table that is passed on to a sink's `init`: it may only have these names."""

    def check(options: Mapping[str, Any]) -> Mapping[str, Any]:
        if unknown := next((name for name in options if name not in names), None):
            raise refusal(f"has {unknown}, which is not an option; the options are {', '.join(names)}")
        return options

    return AfterValidator(check)


def _endpoint(text: str) -> str:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) >= 2**16:
        raise refusal('must be HOST:PORT, such as "127.0.0.1:9464"')
    return text


class LoggingConfig(Section):
    """Metric sinks besides metrics.jsonl of the run's folder, which is always written; transcripts and traces."""

    sinks: tuple[Annotated[str, FunctionName(NAMES, ("spec",))], ...] = Field(default=(), strict=False)
    """Metric sinks, such as ["wandb", "trackio"]. Each has its own table of options, for instance `[logging.wandb]`.
    Your own function takes a `titan_rl.metrics.sinks.types.SinkSpec` and returns a `MetricSink`."""
    transcripts_per_step: NonNegativeInt = 4
    """Groups per step, and per suite of a validation, whose rollouts are written to rollouts.jsonl. Failed and dropped
    rollouts are written in addition."""
    transcript_tokens: bool = True
    """Also write the tokens of these rollouts, each with its text and logprob: about 30 bytes per token."""
    trace: bool = True
    """Write a timeline of each process to trace/ of the run's folder, for `titan-rl view` and Perfetto."""
    wandb: Annotated[
        Mapping[str, Any],
        _options(("project", "entity", "group", "job_type", "tags", "notes", "mode")),
        TakesEffect("logging.sinks", one_of=("wandb",)),
    ] = Field(default={}, strict=False)
    """Arguments of `wandb.init`: { project = "sums", tags = ["small"] }. By default the project is titan_rl, and
    the rest comes from W&B's environment variables. mode = "offline" needs no login; `wandb sync` sends the run
    later."""
    trackio: Annotated[
        Mapping[str, str], _options(("project", "space")), TakesEffect("logging.sinks", one_of=("trackio",))
    ] = Field(default={}, strict=False)
    """project of trackio, by default titan_rl, and space, a Hugging Face Space `user/name` that shows the runs. By
    default `trackio show` does, on this machine."""
    prometheus: Annotated[str, AfterValidator(_endpoint), TakesEffect("logging.sinks", one_of=("prometheus",))] = (
        "127.0.0.1:9464"
    )
    """HOST:PORT of the endpoint /metrics that Prometheus scrapes; port 0 takes a free one and prints it. The endpoint
    requires no key: anyone who can reach it can read the metrics."""

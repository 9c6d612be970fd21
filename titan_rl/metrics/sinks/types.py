"""Interface of metric sinks: `MetricSink`, and the `SinkSpec` that one is opened with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from titan_rl.core.console import LOG, Console
from titan_rl.metrics.sinks.settings import LoggingConfig


@runtime_checkable
class MetricSink(Protocol):
    """Receives the metrics of steps, in order. Its exceptions are reported, and end nothing."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a step.

        Args:
            step: Number of the step. A step may have several records, for instance one of its validation.
            metrics: Values by the names of docs/metrics.md.
        """
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class SinkSpec:
    """Arguments that a sink is opened with.

    Args:
        run: Name of the run's folder.
        folder: The run's folder, with its `config.toml`. A sink may write below it.
        settings: The table `[logging]`.
        step: Step from which the run resumes: later steps that the sink has are run again. 0 for a new run.
        console: Shows lines to the user.
    """

    run: str
    folder: Path
    settings: LoggingConfig
    step: int = 0
    console: Console = LOG

    def tell(self, text: str) -> None:
        """Show the user one line, for instance the URL of the metrics; also if the command is quiet."""
        self.console.warning(text)

    @property
    def config(self) -> Path:
        """Path of the run's settings as TOML. The file need not exist."""
        return self.folder / "config.toml"

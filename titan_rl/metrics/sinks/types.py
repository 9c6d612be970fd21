"""Interface of metric sinks: `MetricSink`, and the `SinkSpec` with which a sink is opened."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from titan_rl.core.console import LOG, Console
from titan_rl.metrics.sinks.settings import LoggingConfig


@runtime_checkable
class MetricSink(Protocol):
    """Receiver of the metrics of steps, in order. Its exceptions are reported, and do not end the run."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a step.

        Args:
            step: Number of the step. A step may have several records, for instance one with the metrics of its
                validation.
            metrics: Values by name; docs/metrics.md lists the names.
        """
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class SinkSpec:
    """Arguments with which a sink is opened.

    Args:
        run: Name of the run's folder.
        folder: Folder of the run, with its `config.toml`. A sink may write below it.
        settings: Settings of the table `[logging]`.
        step: Step from which the run resumes; 0 for a new run. Later steps that the sink already has are run again.
        console: Console for messages to the user.
    """

    run: str
    folder: Path
    settings: LoggingConfig
    step: int = 0
    console: Console = LOG

    def tell(self, text: str) -> None:
        """Show the user one line, such as the URL of the metrics, even if the command is quiet."""
        self.console.warning(text)

    @property
    def config(self) -> Path:
        """Path of the run's settings as TOML. The file may not exist."""
        return self.folder / "config.toml"

"""What takes metrics, and what it is opened with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from titan_rl.metrics.sinks.settings import LoggingConfig


@runtime_checkable
class MetricSink(Protocol):
    """Takes the metrics of steps, in order. What it raises is told of, and ends nothing."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """
        Args:
            step: that they are of; a step may have several records, its validation for instance.
            metrics: by the names of docs/metrics.md.
        """
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class SinkSpec:
    """What a sink is opened with.

    Args:
        run: the name of the run's folder.
        folder: the run's, with its `config.toml`. A sink may write below it.
        settings: all of `[logging]`.
        step: that the run goes on from: later ones that the sink has are run again. 0 where it begins.
        tell: shows a person a line: where to look, for instance.
    """

    run: str
    folder: Path
    settings: LoggingConfig
    step: int = 0
    tell: Callable[[str], None] = lambda text: None

    @property
    def config(self) -> Path:
        """The settings of the run as TOML; it need not be there."""
        return self.folder / "config.toml"

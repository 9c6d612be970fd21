"""What a run shows, and where its metrics go."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping

from titan_rl.config.run import RunConfig
from titan_rl.metrics.sinks.types import MetricSink
from titan_rl.run.directory import RunDirectory
from titan_rl.run.observability.progress import Progress, Verbosity
from titan_rl.run.observability.sinks import Sinks, open_sinks


@contextlib.contextmanager
def open_outputs(
    config: RunConfig,
    run_dir: RunDirectory,
    others: Mapping[str, MetricSink] | None = None,
    *,
    step: int = 0,
    verbosity: Verbosity = Verbosity.NORMAL,
) -> Generator[tuple[Progress, Sinks]]:
    """The screen and the sinks of metrics, closed at the end.

    Args:
        others: sinks beside those that settings ask for, by their names for messages.
        step: that the run goes on from.
        verbosity: of the screen.
    """
    with (
        Progress(config.training.steps, verbosity=verbosity) as progress,
        open_sinks(config.logging, run_dir, progress.warning, others, step=step) as sinks,
    ):
        yield progress, sinks

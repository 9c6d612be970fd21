"""What a run shows and writes while it goes on, and the report at its end."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping
from functools import partial

from titan_rl.config.run import RunConfig
from titan_rl.run.directory import RunDirectory
from titan_rl.run.observability.best_effort import BestEffort
from titan_rl.run.observability.metric_sink import MetricSink
from titan_rl.run.observability.progress import Progress
from titan_rl.run.observability.report import write_report
from titan_rl.run.observability.sinks import Sinks, open_sinks


@contextlib.contextmanager
def open_outputs(
    config: RunConfig, run_dir: RunDirectory, others: Mapping[str, MetricSink] | None = None
) -> Generator[tuple[Progress, Sinks]]:
    """The screen and the sinks of metrics. The report is written when the block ends, however it does.

    Args:
        others: sinks beside those that settings ask for, by their names for messages.
    """
    with Progress(config.training.steps) as progress, contextlib.ExitStack() as at_end:
        reporting = BestEffort("writing report.html", progress.message)
        at_end.callback(reporting.attempt, partial(write_report, run_dir))
        yield progress, at_end.enter_context(open_sinks(config.logging, run_dir, progress.message, others))

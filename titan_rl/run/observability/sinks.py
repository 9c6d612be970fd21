"""Where metrics go: always into the run's folder, and to the sinks that settings name."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from functools import partial

from titan_rl.metrics.sinks.registry import find_sink
from titan_rl.metrics.sinks.settings import LoggingConfig
from titan_rl.metrics.sinks.types import MetricSink, SinkSpec
from titan_rl.run.directory import RunDirectory
from titan_rl.run.observability.background_sink import BackgroundSink
from titan_rl.run.observability.best_effort import BestEffort, Tell


class JSONLSink:
    """`metrics.jsonl` of the run directory."""

    def __init__(self, run_dir: RunDirectory) -> None:
        self._run_dir = run_dir

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run_dir.write_metrics(step, metrics)

    def close(self) -> None:
        self._run_dir.close()


class Sinks:
    """Several sinks as one. What one of them raises is told of, and keeps the records from no other; each has
    a record of its own to do with as it likes.

    Args:
        sinks: by name, for the messages.
    """

    def __init__(self, sinks: Mapping[str, MetricSink], tell: Tell) -> None:
        self._tell = tell
        self._sinks = {name: (sink, BestEffort(f"logging to {name}", tell)) for name, sink in sinks.items()}

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for sink, logging in self._sinks.values():
            logging.attempt(partial(sink.log, step, dict(metrics)))

    def close(self) -> None:
        for name, (sink, logging) in self._sinks.items():
            logging.close()
            BestEffort(f"closing {name}", self._tell).attempt(sink.close)


@contextlib.contextmanager
def open_sinks(
    settings: LoggingConfig,
    run_dir: RunDirectory,
    tell: Tell,
    others: Mapping[str, MetricSink] | None = None,
    *,
    step: int = 0,
) -> Iterator[Sinks]:
    """The sinks that the settings ask for, each in a thread of its own, and others, closed at the end.

    Args:
        others: by their names for messages.
        step: that the run goes on from.

    Raises:
        ConfigError: a sink that is named is not there.
        MissingExtraError: what one of them needs is not installed.
    """
    kinds = {name: find_sink(name) for name in settings.sinks}
    for kind in kinds.values():
        kind.check()
    spec = SinkSpec(run_dir.run_id, run_dir.path, settings, step, tell)
    named = {kind.title: BackgroundSink(partial(kind.make, spec), kind.title, tell) for kind in kinds.values()}
    opened = Sinks({"metrics.jsonl": JSONLSink(run_dir), **named, **(others or {})}, tell)
    try:
        yield opened
    finally:
        opened.close()

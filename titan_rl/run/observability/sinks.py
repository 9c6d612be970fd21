"""Metric sinks of a run: `metrics.jsonl` and the sinks that the settings name. A failing or slow sink cannot end or
delay the run."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Generator, Mapping

from titan_rl.core.calls.cancellation import is_ctrl_c
from titan_rl.core.calls.user_code import summary
from titan_rl.core.console import Console
from titan_rl.metrics.sinks.registry import SinkKind, find_sink
from titan_rl.metrics.sinks.settings import LoggingConfig
from titan_rl.metrics.sinks.types import MetricSink, SinkSpec
from titan_rl.run.directory import RunDirectory
from titan_rl.run.json_lines import RecordWaitsError

logger = logging.getLogger(__name__)


class BestEffort:
    """Attempts of one kind that may fail without ending a run. The first of several failures in a row is reported
    with its reason, and so is the next success. At the end, the number of failures is reported.

    Attributes:
        num_lost: Number of attempts that failed.

    Args:
        what: Name of the attempts in messages, such as "writing rollouts.jsonl".
    """

    def __init__(self, what: str, console: Console) -> None:
        self.num_lost = 0
        self._what = what
        self._console = console
        self._in_a_row = 0
        self._num_waiting = 0

    @contextlib.contextmanager
    def attempt(self) -> Generator[None]:
        """Note whether the block succeeds. Its errors are suppressed, except Ctrl-C."""
        try:
            yield
        except RecordWaitsError as error:
            self._num_waiting += 1
            if self._num_waiting == 1:
                self._console.warning(
                    f"{self._what} waits: {summary(error.__cause__ or error)}; records are kept in memory"
                )
        except BaseException as error:  # a client may even raise SystemExit
            if is_ctrl_c(error):
                raise
            self.num_lost += 1
            self._in_a_row += 1
            if self._in_a_row == 1:
                logger.warning("%s failed", self._what, exc_info=error)
                self._console.warning(f"{self._what} failed, and the run continues without it: {summary(error)}")
        else:
            if self._in_a_row or self._num_waiting:
                kept = f"{self._num_waiting} had waited, " * bool(self._num_waiting)
                self._console.warning(f"{self._what} works again; {kept}{self._in_a_row} were lost meanwhile")
                self._in_a_row = self._num_waiting = 0

    def close(self) -> None:
        """Report the number of failures, if there were any."""
        if self.num_lost:
            self._console.warning(
                f"{self._what} failed {self.num_lost} times in this run; the log has the first reason"
            )


CLOSE_TIMEOUT_S = 30.0
MAX_WAITING = 10_000  # records; a sink that is further behind loses the newest ones


class BackgroundSink:
    """Sink that runs another sink in its own thread, so that a run does not wait for a service on the network.

    Records are passed on in order. Records that the sink refuses are lost, which is reported. If the sink cannot be
    opened, all records are lost.

    Args:
        kind: Kind of the sink, which is created in the thread.
        close_timeout_s: Longest time that `close` waits for the remaining records, in seconds.
        max_waiting: Largest number of records that wait for the sink.
    """

    def __init__(
        self,
        kind: SinkKind,
        spec: SinkSpec,
        *,
        close_timeout_s: float = CLOSE_TIMEOUT_S,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        self._kind = kind
        self._spec = spec
        self._what = kind.title
        self._close_timeout_s = close_timeout_s
        self._logging = BestEffort(f"logging to {kind.title}", spec.console)
        self._max_waiting = max_waiting
        self._waiting: queue.SimpleQueue[tuple[int, Mapping[str, float]] | None] = queue.SimpleQueue()
        self._is_open = True
        # The thread is a daemon, so that a sink that hangs does not keep the program from ending.
        self._thread = threading.Thread(target=self._run, name=f"sink {kind.title}", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Queue a record for the sink.

        Raises:
            TimeoutError: `max_waiting` records are already waiting for the sink.
        """
        if self._waiting.qsize() >= self._max_waiting:
            raise TimeoutError(f"{self._what} is {self._max_waiting} records behind")
        if self._is_open:
            self._waiting.put((step, metrics))

    def close(self) -> None:
        """Pass on the remaining records, and close the sink.

        Raises:
            TimeoutError: The sink has not accepted everything within the time limit.
        """
        self._waiting.put(None)
        self._thread.join(self._close_timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"{self._what} did not take everything within {self._close_timeout_s:g} s of the end")
        self._logging.close()

    def _run(self) -> None:
        sink: MetricSink | None = None
        with BestEffort(f"opening {self._what}", self._spec.console).attempt():
            sink = self._kind.make(self._spec)
        if sink is None:
            self._is_open = False
            return
        while (record := self._waiting.get()) is not None:
            with self._logging.attempt():
                sink.log(*record)
        with BestEffort(f"closing {self._what}", self._spec.console).attempt():
            sink.close()


class JSONLSink:
    """Sink that writes `metrics.jsonl` in the run directory."""

    def __init__(self, run_dir: RunDirectory) -> None:
        self._run_dir = run_dir

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run_dir.write_metrics(step, metrics)

    def close(self) -> None:
        self._run_dir.close()


class Sinks:
    """Several sinks as one. An error of one sink is reported, and does not affect the others. Each sink gets its own
    copy of a record.

    Args:
        sinks: Sinks by their names for messages.
    """

    def __init__(self, sinks: Mapping[str, MetricSink], console: Console) -> None:
        self._console = console
        self._sinks = {name: (sink, BestEffort(f"logging to {name}", console)) for name, sink in sinks.items()}

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for sink, attempts in self._sinks.values():
            with attempts.attempt():
                sink.log(step, dict(metrics))

    def close(self) -> None:
        for name, (sink, attempts) in self._sinks.items():
            attempts.close()
            with BestEffort(f"closing {name}", self._console).attempt():
                sink.close()


@contextlib.contextmanager
def open_sinks(
    settings: LoggingConfig,
    run_dir: RunDirectory,
    console: Console,
    others: Mapping[str, MetricSink] | None = None,
    *,
    step: int = 0,
) -> Generator[Sinks]:
    """Open the sinks that the settings name, each in its own thread, together with other sinks. All are closed when the
    block ends.

    Args:
        others: Further sinks, by their names for messages.
        step: Step that the run continues from.

    Raises:
        ConfigError: The settings name a sink that does not exist.
        MissingExtraError: A package that a sink needs is not installed.
    """
    kinds = {name: find_sink(name) for name in settings.sinks}
    for kind in kinds.values():
        kind.check()
    run_dir.show_on(console)
    spec = SinkSpec(run_dir.run_id, run_dir.path, settings, step, console)
    named = {kind.title: BackgroundSink(kind, spec) for kind in kinds.values()}
    opened = Sinks({"metrics.jsonl": JSONLSink(run_dir), **named, **(others or {})}, console)
    try:
        yield opened
    finally:
        opened.close()

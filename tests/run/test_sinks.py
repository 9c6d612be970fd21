"""Sinks that fail or hang: their losses are reported, and nothing else is lost."""

from __future__ import annotations

import asyncio
import json
import resource
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from titan_rl.core.console import ConsoleLines
from titan_rl.metrics.sinks.registry import SinkKind
from titan_rl.metrics.sinks.settings import LoggingConfig
from titan_rl.metrics.sinks.types import SinkSpec
from titan_rl.run import json_lines
from titan_rl.run.directory import RunDirectory, read_jsonl
from titan_rl.run.observability.sinks import BackgroundSink, Sinks, open_sinks


class Service:
    """Sink that fails while `down` is set. `taken` lists the steps that it has received."""

    def __init__(self) -> None:
        self.down = False
        self.taken: list[int] = []
        self.closed = False
        self.asked = threading.Event()
        self.answers = threading.Event()
        self.answers.set()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.asked.set()
        assert self.answers.wait(20)
        if self.down:
            raise ConnectionError("503")
        self.taken.append(step)

    def close(self) -> None:
        self.closed = True


def in_background(make: Callable[[], Service], console: ConsoleLines, **limits: Any) -> BackgroundSink:
    spec = SinkSpec("run", Path(), LoggingConfig(), 0, console)
    return BackgroundSink(SinkKind(lambda _: make(), "W&B"), spec, **limits)


def test_failing_sink_is_reported_once_and_when_it_recovers():
    console, service, other = ConsoleLines(), Service(), Service()
    sinks = Sinks({"W&B": service, "other": other}, console)
    for step in range(6):
        service.down = 1 <= step <= 3
        sinks.log(step, {"loss": 0.0})
    sinks.close()
    assert (service.taken, other.taken) == ([0, 4, 5], [0, 1, 2, 3, 4, 5])
    assert service.closed
    assert other.closed
    assert console == [
        "logging to W&B failed, and the run continues without it: ConnectionError: 503",
        "logging to W&B works again; 3 were lost meanwhile",
        "logging to W&B failed 3 times in this run; the log has the first reason",
    ]


def test_slow_sink_does_not_block_and_gets_its_records_later():
    console, service = ConsoleLines(), Service()
    service.answers.clear()
    sink = in_background(lambda: service, console)
    for step in range(3):
        sink.log(step, {})
    assert service.asked.wait(20)
    assert service.taken == []
    service.answers.set()
    sink.close()
    assert service.taken == [0, 1, 2]
    assert service.closed
    assert console == []


def test_hanging_sink_does_not_block_the_end_of_the_run():
    console, service = ConsoleLines(), Service()
    service.answers.clear()
    sink = in_background(lambda: service, console, close_timeout_s=0.01, max_waiting=2)
    sink.log(0, {})
    assert service.asked.wait(20)
    sinks = Sinks({"W&B": sink}, console)
    for step in range(1, 5):
        sinks.log(step, {})
    sinks.close()
    assert console == [
        "logging to W&B failed, and the run continues without it: TimeoutError: W&B is 2 records behind",
        "logging to W&B failed 2 times in this run; the log has the first reason",
        "closing W&B failed, and the run continues without it: TimeoutError: W&B did not take everything within 0.01 s "
        "of the end",
    ]
    service.answers.set()


def test_sink_that_cannot_be_opened_is_skipped():
    def refuse() -> Service:
        raise ConnectionError("no route to host")

    console = ConsoleLines()
    sink = in_background(refuse, console)
    for step in range(3):
        sink.log(step, {})
    sink.close()
    assert console == ["opening W&B failed, and the run continues without it: ConnectionError: no route to host"]


class PanicException(BaseException):
    """Exception like the one that a panic in a Rust extension raises."""


WORSE_THAN_EXCEPTIONS = [SystemExit("no login"), asyncio.CancelledError("no login"), PanicException("no login")]


class Leaves(Service):
    """Sink that raises at every second record, as a client that ends the process does."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if step % 2:
            raise self.error
        super().log(step, metrics)

    def close(self) -> None:
        super().close()
        raise self.error


@pytest.mark.parametrize("error", WORSE_THAN_EXCEPTIONS)
@pytest.mark.parametrize("has_thread", [False, True])
def test_base_exception_in_a_sink_is_reported(error: BaseException, has_thread: bool):
    console, service, other = ConsoleLines(), Leaves(error), Service()
    sink = in_background(lambda: service, console) if has_thread else service
    sinks = Sinks({"W&B": sink, "other": other}, console)
    for step in range(4):
        sinks.log(step, {})
    sinks.close()
    assert (service.taken, other.taken) == ([0, 2], [0, 1, 2, 3])
    assert other.closed
    text = f"{type(error).__name__}: no login"
    assert console[0] == f"logging to W&B failed, and the run continues without it: {text}"
    assert f"closing W&B failed, and the run continues without it: {text}" in console


@pytest.mark.parametrize("error", WORSE_THAN_EXCEPTIONS)
def test_sink_that_raises_base_exception_when_opened_is_skipped(error: BaseException):
    def leave() -> Service:
        raise error

    console = ConsoleLines()
    sink = in_background(leave, console)
    sink.log(0, {})
    sink.close()
    assert console == [f"opening W&B failed, and the run continues without it: {type(error).__name__}: no login"]


def test_sink_that_mutates_its_record_does_not_affect_others():
    class Changes(Service):
        def log(self, step: int, metrics: Any) -> None:
            super().log(step, metrics)
            metrics["loss"] = 99.0
            metrics.pop("reward")

    class Keeps(Service):
        def log(self, step: int, metrics: Mapping[str, float]) -> None:
            kept.append(dict(metrics))

    kept: list[dict[str, float]] = []
    metrics = {"loss": 0.5, "reward": 1.0}
    Sinks({"changes": Changes(), "keeps": Keeps()}, ConsoleLines()).log(1, metrics)
    assert kept == [metrics] == [{"loss": 0.5, "reward": 1.0}]


def test_failed_metrics_writes_are_counted_and_later_ones_written(tmp_path: Path):
    console, run_dir = ConsoleLines(), RunDirectory(tmp_path)
    run_dir.metrics.mkdir()
    with open_sinks(LoggingConfig(), run_dir, console) as sinks:
        sinks.log(1, {"loss": 0.5})
        sinks.log(2, {"loss": 0.5})
        run_dir.metrics.rmdir()
        sinks.log(3, {"loss": 0.5})
    assert [record["step"] for record in read_jsonl(run_dir.metrics)] == [3]
    assert console[0].startswith("logging to metrics.jsonl failed, and the run continues without it: IsADirectoryError")
    assert console[1] == "logging to metrics.jsonl works again; 2 were lost meanwhile"


def test_write_without_space_leaves_no_partial_line(tmp_path: Path):
    run_dir = RunDirectory(tmp_path)
    run_dir.write_rollout({"step": 1})
    with quota(100), pytest.raises(OSError, match="No space left"):
        run_dir.write_rollout({"step": 2, "text": "x" * 200})
    assert run_dir.rollouts.read_bytes() == b'{"step": 1}\n'
    run_dir.write_rollout({"step": 3})
    assert steps_in(run_dir.rollouts) == [1, 2, 3], "the record waited for room"


def steps_in(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_metrics_of_a_full_disk_wait_and_are_written_when_there_is_room(tmp_path: Path):
    console, run_dir = ConsoleLines(), RunDirectory(tmp_path)
    with open_sinks(LoggingConfig(), run_dir, console) as sinks:
        sinks.log(1, {"loss": 0.5})
        with quota(60):
            for step in range(2, 26):
                sinks.log(step, {"loss": 0.5})
        sinks.log(26, {"loss": 0.5})
        assert steps_in(run_dir.metrics) == list(range(1, 27))
    waits, works = console
    assert waits.startswith("logging to metrics.jsonl waits: OSError: [Errno 28] No space left on device")
    assert works == "logging to metrics.jsonl works again; 24 had waited, 0 were lost meanwhile"


def test_records_that_wait_are_written_at_the_end_of_a_run(tmp_path: Path):
    console, run_dir = ConsoleLines(), RunDirectory(tmp_path)
    run_dir.show_on(console)
    with quota(10), pytest.raises(OSError, match="No space left"):
        run_dir.write_rollout({"step": 1})
    run_dir.close()
    assert steps_in(run_dir.rollouts) == [1]
    assert console == []


def test_records_that_never_find_room_are_reported_at_the_end(tmp_path: Path):
    console, run_dir = ConsoleLines(), RunDirectory(tmp_path)
    run_dir.show_on(console)
    with quota(10):
        with pytest.raises(OSError, match="No space left"):
            run_dir.write_rollout({"step": 1})
        run_dir.close()
    (lost,) = console
    assert lost.startswith(f"1 records of {run_dir.rollouts} were lost: [Errno 28] No space left")


def test_records_beyond_the_limit_of_memory_are_lost_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(json_lines, "MOST_WAITING_BYTES", 100)
    console, run_dir = ConsoleLines(), RunDirectory(tmp_path)
    with open_sinks(LoggingConfig(), run_dir, console) as sinks:
        with quota(10):
            for step in range(1, 6):
                sinks.log(step, {"loss": 0.5})
        sinks.log(6, {"loss": 0.5})
    kept = steps_in(run_dir.metrics)
    assert kept == [*range(1, len(kept)), 6]
    assert f"{len(kept) - 1} had waited, {6 - len(kept)} were lost meanwhile" in console[-2]


@pytest.mark.parametrize("rotated", [False, True], ids=["removed", "rotated"])
def test_file_that_is_removed_or_rotated_begins_anew_and_is_reported(tmp_path: Path, rotated: bool):
    console, run_dir = ConsoleLines(), RunDirectory(tmp_path)
    with open_sinks(LoggingConfig(), run_dir, console) as sinks:
        sinks.log(1, {"loss": 0.5})
        if rotated:
            run_dir.metrics.rename(tmp_path / "metrics.jsonl.1")
        else:
            run_dir.metrics.unlink()
        sinks.log(2, {"loss": 0.5})
        sinks.log(3, {"loss": 0.5})
    assert steps_in(run_dir.metrics) == [2, 3]
    assert console == [f"{run_dir.metrics} was removed or replaced; a new file begins there"]


@contextmanager
def quota(size: int) -> Iterator[None]:
    """Limit the size of files, so that a larger write is cut short: only in the block, as test logs may be larger."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_time_continues_across_a_resume(tmp_path: Path):
    first = RunDirectory(tmp_path)
    first.write_metrics(1, {})
    first.close()
    path = first.metrics
    path.write_text(json.dumps({"step": 1, "time_s": 100.0}) + "\n")
    second = RunDirectory(tmp_path)
    second.write_metrics(2, {})
    second.write_metrics(3, {})
    times = [record["time_s"] for record in read_jsonl(path)]
    assert times[0] == 100.0
    assert 100.0 <= times[1] <= times[2] < 110.0
    assert 100.0 < second.elapsed_s < 110.0

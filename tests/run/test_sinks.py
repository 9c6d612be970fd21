"""Sinks that fail or hang: what they lose is told, and nothing else is lost."""

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
from titan_rl.run.directory import RunDirectory, read_jsonl
from titan_rl.run.observability.sinks import BackgroundSink, Sinks, open_sinks


class Service:
    """A sink that is down when it is told to be. `taken` lists what it has got."""

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


def in_background(make: Callable[[], Service], told: ConsoleLines, **limits: Any) -> BackgroundSink:
    spec = SinkSpec("run", Path(), LoggingConfig(), 0, told)
    return BackgroundSink(SinkKind(lambda _: make(), "W&B"), spec, **limits)


def test_a_sink_that_raises_is_told_of_once_and_again_when_it_works():
    told, service, other = ConsoleLines(), Service(), Service()
    sinks = Sinks({"W&B": service, "other": other}, told)
    for step in range(6):
        service.down = 1 <= step <= 3
        sinks.log(step, {"loss": 0.0})
    sinks.close()
    assert (service.taken, other.taken) == ([0, 4, 5], [0, 1, 2, 3, 4, 5])
    assert service.closed
    assert other.closed
    assert told == [
        "logging to W&B failed, and the run continues without it: ConnectionError: 503",
        "logging to W&B works again; 3 were lost meanwhile",
        "logging to W&B failed 3 times in this run; the log has the first reason",
    ]


def test_a_service_that_does_not_answer_holds_up_nothing_and_gets_its_records_later():
    told, service = ConsoleLines(), Service()
    service.answers.clear()
    sink = in_background(lambda: service, told)
    for step in range(3):
        sink.log(step, {})
    assert service.asked.wait(20)
    assert service.taken == []
    service.answers.set()
    sink.close()
    assert service.taken == [0, 1, 2]
    assert service.closed
    assert told == []


def test_a_service_that_never_answers_does_not_keep_the_run_from_ending():
    told, service = ConsoleLines(), Service()
    service.answers.clear()
    sink = in_background(lambda: service, told, close_timeout_s=0.01, max_waiting=2)
    sink.log(0, {})
    assert service.asked.wait(20)
    sinks = Sinks({"W&B": sink}, told)
    for step in range(1, 5):
        sinks.log(step, {})
    sinks.close()
    assert told == [
        "logging to W&B failed, and the run continues without it: TimeoutError: W&B is 2 records behind",
        "logging to W&B failed 2 times in this run; the log has the first reason",
        "closing W&B failed, and the run continues without it: TimeoutError: W&B did not take everything within 0.01 s "
        "of the end",
    ]
    service.answers.set()


def test_a_service_that_is_down_from_the_start_is_left_out():
    def refuse() -> Service:
        raise ConnectionError("no route to host")

    told = ConsoleLines()
    sink = in_background(refuse, told)
    for step in range(3):
        sink.log(step, {})
    sink.close()
    assert told == ["opening W&B failed, and the run continues without it: ConnectionError: no route to host"]


class PanicException(BaseException):
    """As extensions written in Rust raise."""


WORSE_THAN_EXCEPTIONS = [SystemExit("no login"), asyncio.CancelledError("no login"), PanicException("no login")]


class Leaves(Service):
    """Ends the process, or what it takes for one, at every second record."""

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
def test_a_sink_that_ends_more_than_itself_is_told_of(error: BaseException, has_thread: bool):
    told, service, other = ConsoleLines(), Leaves(error), Service()
    sink = in_background(lambda: service, told) if has_thread else service
    sinks = Sinks({"W&B": sink, "other": other}, told)
    for step in range(4):
        sinks.log(step, {})
    sinks.close()
    assert (service.taken, other.taken) == ([0, 2], [0, 1, 2, 3])
    assert other.closed
    text = f"{type(error).__name__}: no login"
    assert told[0] == f"logging to W&B failed, and the run continues without it: {text}"
    assert f"closing W&B failed, and the run continues without it: {text}" in told


@pytest.mark.parametrize("error", WORSE_THAN_EXCEPTIONS)
def test_a_service_whose_client_leaves_when_opened_is_left_out(error: BaseException):
    def leave() -> Service:
        raise error

    told = ConsoleLines()
    sink = in_background(leave, told)
    sink.log(0, {})
    sink.close()
    assert told == [f"opening W&B failed, and the run continues without it: {type(error).__name__}: no login"]


def test_a_sink_that_changes_its_record_changes_no_other():
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


def test_metrics_that_the_disk_does_not_take_are_counted_and_the_next_ones_written(tmp_path: Path):
    told, run_dir = ConsoleLines(), RunDirectory(tmp_path)
    run_dir.metrics.mkdir()
    with open_sinks(LoggingConfig(), run_dir, told) as sinks:
        sinks.log(1, {"loss": 0.5})
        sinks.log(2, {"loss": 0.5})
        run_dir.metrics.rmdir()
        sinks.log(3, {"loss": 0.5})
    assert [record["step"] for record in read_jsonl(run_dir.metrics)] == [3]
    assert told[0].startswith("logging to metrics.jsonl failed, and the run continues without it: IsADirectoryError")
    assert told[1] == "logging to metrics.jsonl works again; 2 were lost meanwhile"


def test_a_line_without_room_leaves_no_half_of_it(tmp_path: Path):
    run_dir = RunDirectory(tmp_path)
    run_dir.write_rollout({"step": 1})
    with quota(100), pytest.raises(OSError, match="No space left"):
        run_dir.write_rollout({"step": 2, "text": "x" * 200})
    run_dir.write_rollout({"step": 3})
    assert [json.loads(line)["step"] for line in run_dir.rollouts.read_text().splitlines()] == [1, 3]


@contextmanager
def quota(size: int) -> Iterator[None]:
    """A file that grows beyond it takes what fits, and no more: within the block alone, for a log of the tests' own may
    be larger."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_time_goes_on_over_a_resume(tmp_path: Path):
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

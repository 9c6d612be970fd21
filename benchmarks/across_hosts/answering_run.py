"""A run of `answering.py` in a separate process, and its events."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.across_hosts.kept_versions import REPOSITORY
from tests.hosts.namespaces import NamespaceHost

LIMIT_S = 60.0
END_S = 30.0
SCRIPTED = "benchmarks.across_hosts.answering:scripted"


@dataclass(frozen=True, slots=True)
class Event:
    """Event of `answering.py`; missing fields are ""."""

    at: float  # by `time.monotonic()`
    what: str
    text: str = ""
    request: str = ""
    replica: str = ""
    process: str = ""


class AnsweringRun:
    """Running `answering.py`.

    Attributes:
        folder: of the run.
    """

    def __init__(self, folder: Path, process: subprocess.Popen[str]) -> None:
        self.folder = folder
        self._process = process
        self._events: list[Event] = []
        self._told = threading.Condition()
        self._ended = False
        threading.Thread(target=self._read, daemon=True).start()

    @property
    def events(self) -> list[Event]:
        """All events so far."""
        with self._told:
            return list(self._events)

    def wait(self, happened: Callable[[Event], bool], since: float = 0.0, limit_s: float = LIMIT_S) -> Event:
        """Wait for the first matching event since a time, and return it without consuming it.

        Raises:
            RuntimeError: no such event within the time limit, or before the run ended.
        """

        def found() -> Event | None:
            return next((event for event in self._events if event.at >= since and happened(event)), None)

        with self._told:
            self._told.wait_for(lambda: self._ended or found(), limit_s)
            if (event := found()) is None:
                messages = "\n".join(event.text for event in self._events if event.what == "message")
                raise RuntimeError(
                    f"the run {'has ended' if self._ended else 'makes no progress'}; its messages:\n{messages}"
                )
            return event

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._told:
                self._events.append(Event(**json.loads(line)))
                self._told.notify_all()
        with self._told:
            self._ended = True
            self._told.notify_all()


@contextlib.contextmanager
def answering_run(
    hosts: Sequence[NamespaceHost], *, in_flight: int, tokens: int, **settings: str
) -> Generator[AnsweringRun]:
    """Start a run on these hosts, with a worker on each, and end it with the block.

    Args:
        in_flight: requests at a time.
        tokens: of each answer.
        settings: settings that differ from the example's, with double underscores instead of dots.
    """
    with tempfile.TemporaryDirectory(prefix="answering-") as name:
        folder = Path(name)
        for host in hosts:
            host.start_worker(folder / f"worker-{host.name}.txt")
        given = {
            "hosts.addresses": ",".join(host.worker_address for host in hosts),
            "hosts.generate": str(len(hosts)),
            "generation.num_generators": str(len(hosts)),
            **{name.replace("__", "."): value for name, value in settings.items()},
        }
        options = [str(folder), str(in_flight), str(tokens), *[f"{name}={value}" for name, value in given.items()]]
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.across_hosts.answering", *options],
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            run = AnsweringRun(folder, process)
            run.wait(lambda event: event.what == "serving", limit_s=2 * LIMIT_S)
            yield run
        finally:
            _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.close()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()

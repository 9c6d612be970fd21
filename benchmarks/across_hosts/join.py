"""Time for a host to join a run in progress, compared with the start of one engine in the same run.

A join lasts from the call of `titan-rl hosts RUN add ADDRESS` until the host's generator has answered a request. The
start of an engine lasts from the moment at which the run begins to start a generator's process, on a host of the run,
until that process has answered a request. In each round the host joins, its generator is killed and restarted, and the
host is drained. In both cases two engines share the cores with the run and with each other.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from benchmarks.across_hosts.answering_run import LIMIT_S, AnsweringRun, answering_run
from benchmarks.across_hosts.kept_versions import REPOSITORY
from benchmarks.paired import Spread, report
from tests.e2e.runs import process_writing_to
from tests.hosts.namespaces import NamespaceHost, namespaces

IN_FLIGHT, TOKENS = 4, 32
TARGET = 1.2


def measure(rounds: int) -> None:
    with (
        namespaces(2) as (here, joins),
        answering_run([here], in_flight=IN_FLIGHT, tokens=TOKENS, hosts__max_respawns=str(rounds)) as run,
    ):
        joins.start_worker(run.folder / "worker-that-joins.txt")
        measured = [_join(run, joins) for _ in range(rounds)]
    report("join_until_its_engine_starts_s", Spread([before for before, _, _ in measured]), "s")
    report("join_as_a_whole_s", Spread([join for _, join, _ in measured]), "s")
    report("engine_start_s", Spread([start for *_, start in measured]), "s")
    report("join_s", Spread([join / start for _, join, start in measured]), "ratio", TARGET)


def _join(run: AnsweringRun, host: NamespaceHost) -> tuple[float, float, float]:
    """Seconds of a join until its engine is started and in total, and of the start of an engine."""
    began = time.monotonic()
    old = {event.process for event in run.events}
    _command("hosts", str(run.folder), "add", host.worker_address)
    joined = run.wait(lambda event: event.what == "answered" and event.process not in old, began)
    joining = run.wait(lambda event: (event.what, event.replica) == ("starts", joined.replica), began)
    os.kill(process_writing_to(run.folder / "logs" / f"{joined.replica}.log"), signal.SIGKILL)
    starts = run.wait(lambda event: (event.what, event.replica) == ("starts", joined.replica), joined.at)
    started = run.wait(
        lambda e: (e.what, e.replica) == ("answered", joined.replica) and e.process != joined.process, starts.at
    )
    _command("hosts", str(run.folder), "drain", host.name)
    return joining.at - began, joined.at - began, started.at - starts.at


def _command(*words: str) -> None:
    subprocess.run(
        [sys.executable, "-m", "titan_rl.cli.main", *words],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdout=sys.stderr,
        check=True,
        timeout=3 * LIMIT_S,
    )

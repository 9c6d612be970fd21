"""Time until a run detects the loss of a host, such as a power failure.

There are two figures: the time until all calls to the host have failed, and the time until all its requests have
received tokens elsewhere. Monarch alone reports the loss after 68 s.
"""

from __future__ import annotations

import time

from benchmarks.across_hosts.answering_run import SCRIPTED, AnsweringRun, answering_run
from benchmarks.paired import Spread, report
from tests.hosts.namespaces import NamespaceHost, namespaces

IN_FLIGHT, TOKENS = 24, 2000  # a token takes a millisecond, so nearly every request is in the middle of its answer
RUNNING_S = 3.0
TARGET = 4.0


def measure(rounds: int) -> None:
    with (
        namespaces(rounds + 1) as hosts,
        answering_run(
            list(hosts), in_flight=IN_FLIGHT, tokens=TOKENS, generation__engine=SCRIPTED, generation__max_running="64"
        ) as run,
    ):
        measured = [_lose(run, hosts[place], f"generator-{place}") for place in range(rounds)]
    report("host_loss_calls_failed_s", Spread([failed for failed, _ in measured]), "s")
    report("host_loss_detection_s", Spread([gone_on for _, gone_on in measured]), "s", TARGET)


def _lose(run: AnsweringRun, host: NamespaceHost, replica: str) -> tuple[float, float]:
    """Seconds until the last call to a host has failed, and until the last of its requests continues elsewhere."""
    time.sleep(RUNNING_S)
    killed = time.monotonic()
    host.kill()
    run.wait(lambda event: event.what == "failed" and event.replica == replica, since=killed)
    there = {event.request for event in run.events if event.what == "sent" and event.replica == replica}
    there -= {event.request for event in run.events if event.what == "answered" and event.replica == replica}
    if not there:
        raise RuntimeError(f"{replica} had no requests when its host was killed")
    failed, gone_on = zip(*[_moved(run, replica, request, killed) for request in there], strict=True)
    return max(failed) - killed, max(gone_on) - killed


def _moved(run: AnsweringRun, replica: str, request: str, since: float) -> tuple[float, float]:
    """Times at which the call of a request to a replica failed, and at which it received tokens from another."""
    failed = run.wait(lambda e: (e.what, e.request, e.replica) == ("failed", request, replica), since)
    heard = run.wait(lambda e: (e.what, e.request) == ("heard", request) and e.replica != replica, since)
    return failed.at, heard.at

"""Status of a run on the disk: whether it is running, how it ended, a heartbeat, and its report."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Generator, Sequence
from pathlib import Path

from titan_rl.core.calls.user_code import reason, summary
from titan_rl.core.run_files import LOCK, RunStatus, read_status, seen_from
from titan_rl.run.terminal.standard_streams import write_stderr_unbuffered
from titan_rl.viewer.report import write_report

logger = logging.getLogger(__name__)

REPORT_S = 20.0
"""Longest time to read rollouts for the report, in seconds. The end of a run waits for it."""


BEAT_S = 10.0
"""Seconds between heartbeats of a run, for observers that cannot see its lock."""


@contextlib.contextmanager
def report_written(folder: Path, out: Path) -> Generator[None]:
    """Write the report when the block ends, with or without an error. A failure to write it is reported, and does not
    fail the run. A signal ends only the writing, because the run has already ended."""
    try:
        yield
    finally:
        try:
            write_report([folder], out, patience_s=REPORT_S)
        except Exception as error:
            logger.warning("writing report.html failed", exc_info=error)
            write_stderr_unbuffered(f"writing report.html failed, which does not affect the run: {summary(error)}")
        except BaseException:
            write_stderr_unbuffered(
                f"the run has ended; its report was not written: titan-rl view {folder} --report {out}"
            )


@contextlib.contextmanager
def status_kept(folder: Path, *, begins: bool, changes: Sequence[str] = ()) -> Generator[RunStatus]:
    """Keep a run's `status.json` up to date: it says that the run is running during the block, and then the outcome. A
    full disk does not end the run.

    Args:
        begins: Whether the run is new, not resumed.
        changes: Inputs that have changed since the run was stopped.

    Yields:
        The status, whose state the block sets to "stopped" if a signal has stopped the run before it was finished.
    """
    if begins:
        status = RunStatus("running", time.time(), seen_from=seen_from())
    else:
        before = read_status(folder)
        status = RunStatus("running", before.began, [*before.resumed, time.time()], seen_from=seen_from())
        status.changes = [*before.changes, *changes]
    _write(status, folder)
    try:
        with _heartbeat(folder / LOCK):
            yield status
    except BaseException as error:
        status.state = "failed" if isinstance(error, Exception) else "stopped"
        status.reason = "\n".join([reason(error), *getattr(error, "__notes__", ())])
        raise
    else:
        status.state = "finished" if status.state == "running" else status.state
    finally:
        status.ended = time.time()
        _write(status, folder)


@contextlib.contextmanager
def _heartbeat(lock: Path) -> Generator[None]:
    """Touch the lock file from a thread, as a heartbeat: a run whose event loop is blocked is also alive."""
    over = threading.Event()

    def beat() -> None:
        while True:
            with contextlib.suppress(OSError):
                os.utime(lock)
            if over.wait(BEAT_S):
                return

    beating = threading.Thread(target=beat, name="heartbeat", daemon=True)
    beating.start()
    try:
        yield
    finally:
        over.set()
        beating.join(BEAT_S)


def note_waiting(folder: Path, waits_for: str) -> None:
    """Write to the `status.json` of a running run what it is waiting for; "" for nothing."""
    status = read_status(folder)
    status.state, status.reason, status.ended, status.waits_for = "running", "", None, waits_for
    _write(status, folder)


def _write(status: RunStatus, folder: Path) -> None:
    try:
        status.write(folder)
    except OSError as error:
        logger.warning("the status of the run cannot be written: %s", error)

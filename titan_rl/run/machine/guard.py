"""Guard process of a run, which acts when the run's own process cannot.

It hears of every signal that the run gets, and when the run's process has ended. A second SIGINT or SIGTERM ends a run
whose interpreter does not react: one that is held up in a call of native code that keeps Python's lock. And when the
process has ended without cleaning up, by that or by a SIGKILL, the guard cleans up in its place.

This file runs as a program of its own, and imports the rest of titan_rl only once that is needed.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path

STOPS = (signal.SIGINT, signal.SIGTERM)
ONE_STOP_S = 0.3
"""Signals closer together are one: `timeout` sends its own to the process and to its group."""
GRACE_S = 1.5  # for a process that reacts
CLEANING_S = 20.0
HAS_DESCRIPTORS = hasattr(os, "pidfd_open")


@contextlib.contextmanager
def guarded(root: Path, run_id: str, advice: str) -> Generator[None]:
    """Guard this process for the length of the block. Main thread only; does nothing if the system lacks process
    descriptors.

    Args:
        root: where the scratch folders are.
        run_id: in the names of the run's weights in shared memory.
        advice: what the user is told when the process has to be killed.
    """
    from titan_rl.core.calls.plain import terminal_text

    if not HAS_DESCRIPTORS:
        yield
        return
    read, write = os.pipe()
    os.set_blocking(write, False)
    guard = _start(read, root, run_id, terminal_text(advice))
    os.close(read)
    before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(write)
        guard.kill()
        guard.wait()


def keep_clean(root: Path, name: str) -> subprocess.Popen[bytes] | None:
    """Start a guard that gets no signals, and cleans up in `root` when this process has ended. The caller kills it
    after cleaning up itself. None if the system lacks process descriptors.

    Args:
        name: Told to whoever lists processes.
    """
    return _start(subprocess.DEVNULL, root, name, "") if HAS_DESCRIPTORS else None


def _start(signals: int, root: Path, run_id: str, advice: str) -> subprocess.Popen[bytes]:
    process = os.pidfd_open(os.getpid())
    try:
        # Of a session of its own, so that Ctrl-C in the terminal does not reach it. -P: the file's folder is no place
        # for modules.
        return subprocess.Popen(
            [sys.executable, "-P", __file__, str(process), str(root), run_id, advice],
            stdin=signals,
            pass_fds=[process],
            start_new_session=True,
        )
    finally:
        os.close(process)


def watch(process: int, root: Path, run_id: str, advice: str) -> None:
    """Watch a process until it has ended and nothing of it is left. Signal numbers arrive on standard input.

    Args:
        process: its descriptor.
    """
    poll = select.poll()
    poll.register(process, select.POLLIN)
    poll.register(0, select.POLLIN)
    num_stops, last = 0, 0.0
    while True:
        ready = dict(poll.poll())
        if process in ready:
            break
        numbers = os.read(0, 4096)
        if not numbers:  # the run is over, and cleans up itself
            poll.unregister(0)
        now = time.monotonic()
        if any(number in STOPS for number in numbers) and now - last > ONE_STOP_S:
            num_stops, last = num_stops + 1, now
        if num_stops >= 2:
            _end(process, advice)
    _clean_up(root, run_id)


def _end(process: int, advice: str) -> None:
    """Kill a process that does not end by itself."""
    poll = select.poll()
    poll.register(process, select.POLLIN)
    if not poll.poll(GRACE_S * 1000):
        text = f"\ntitan-rl: the run does not react, and is killed; {advice}\n"
        with contextlib.suppress(OSError):  # nobody reads it
            os.write(2, text.encode())
        signal.pidfd_send_signal(process, signal.SIGKILL)


def _clean_up(root: Path, run_id: str) -> None:
    """Clean up after the run. Its other processes end with it, and only then release the locks of their folders."""
    sys.path.append(str(Path(__file__).parents[3]))
    from titan_rl.cluster.hosts.folders import clean_up_after_dead_runs
    from titan_rl.weights.shard_files import shard_folders

    deadline = time.monotonic() + CLEANING_S
    while True:
        clean_up_after_dead_runs(root)
        if not shard_folders(run_id) or time.monotonic() > deadline:
            return
        time.sleep(0.1)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # schedulers send it to all that a job has
    watch(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4])

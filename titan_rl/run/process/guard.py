"""Guard process of a run, which acts when the run's own process cannot.

The guard is notified of every signal that the run's process receives, and of the end of that process. If the process
does not react to a second SIGINT or SIGTERM, because native code holds the GIL, the guard kills it, and records in the
run's `status.json` that the run was stopped. If the process has ended without cleaning up, for this reason or because
of a SIGKILL, the guard cleans up instead.

This file runs as a separate program, and imports the rest of titan_rl only when it needs it.
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

SECOND_STOPS = (signal.SIGINT, signal.SIGTERM)
"""Signals of which a second one ends a run at once. A terminal that closes may send several SIGHUPs."""
STOPS = (*SECOND_STOPS, signal.SIGHUP)
ONE_STOP_S = 0.3
"""Time in seconds within which several signals count as one: `timeout` sends its signal both to the process and to the
process group."""
GRACE_S = 1.5  # time for a process to react
CLEANING_S = 20.0
HAS_DESCRIPTORS = hasattr(os, "pidfd_open")

echoes: list[int] = []
"""Descriptors to which the guards of this process write every signal that it receives, the innermost guard last."""


@contextlib.contextmanager
def guarded(root: Path, run_id: str, advice: str, run: Path | None = None) -> Generator[None]:
    """Guard this process during the block. Call this in the main thread only. It does nothing if the system lacks
    process descriptors.

    Args:
        root: Folder with the scratch folders.
        run_id: Id in the names of the run's weights in shared memory.
        advice: Advice for the user if the process has to be killed.
        run: Folder of the run whose status then says that it was stopped.
    """
    from titan_rl.core.plain_data import terminal_text

    if not HAS_DESCRIPTORS:
        yield
        return
    (read, write), (echo, back) = os.pipe(), os.pipe()
    for descriptor in (write, echo, back):
        os.set_blocking(descriptor, False)
    guard = _start(read, root, run_id, terminal_text(advice), run, echo=back)
    os.close(read)
    os.close(back)
    before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    echoes.append(echo)
    try:
        yield
    finally:
        echoes.remove(echo)
        signal.set_wakeup_fd(before)
        os.close(write)
        guard.kill()
        guard.wait()
        os.close(echo)


def keep_clean(root: Path, name: str) -> subprocess.Popen[bytes] | None:
    """Start a guard that receives no signals, and cleans up in `root` when this process has ended. The caller kills the
    guard after cleaning up itself. Return None if the system lacks process descriptors.

    Args:
        name: Name to show in lists of processes.
    """
    return _start(subprocess.DEVNULL, root, name, "") if HAS_DESCRIPTORS else None


def _start(
    signals: int, root: Path, run_id: str, advice: str, run: Path | None = None, echo: int = subprocess.DEVNULL
) -> subprocess.Popen[bytes]:
    process = os.pidfd_open(os.getpid())
    folder = [] if run is None else [str(run)]
    try:
        # A separate session keeps Ctrl-C in the terminal from reaching the guard. -P keeps Python from searching for
        # modules in this file's folder.
        return subprocess.Popen(
            [sys.executable, "-P", __file__, str(process), str(root), run_id, advice, *folder],
            stdin=signals,
            stdout=echo,
            pass_fds=[process],
            start_new_session=True,
        )
    finally:
        os.close(process)


def watch(process: int, root: Path, run_id: str, advice: str, run: Path | None = None) -> None:
    """Watch a process until it has ended, and clean up after it. Signal numbers arrive on standard input, and are
    written to standard output, which wakes the event loop of the process.

    Args:
        process: Descriptor of the process.
        run: Folder of the run whose status says that it was stopped if the process has to be killed.
    """
    sys.path.append(str(Path(__file__).parents[3]))
    poll = select.poll()
    poll.register(process, select.POLLIN)
    poll.register(0, select.POLLIN)
    num_stops, last, is_killed = 0, 0.0, False
    while True:
        ready = dict(poll.poll())
        if process in ready:
            break
        numbers = os.read(0, 4096)
        if not numbers:  # the run is over, and cleans up by itself
            poll.unregister(0)
        with contextlib.suppress(OSError):  # the pipe is full while no event loop runs
            os.write(1, numbers)
        now = time.monotonic()
        stops = STOPS if num_stops == 0 else SECOND_STOPS
        if any(number in stops for number in numbers) and now - last > ONE_STOP_S:
            num_stops, last = num_stops + 1, now
        if num_stops >= 2 and not is_killed:
            is_killed = _end(process, advice)
    if is_killed and run is not None:
        _record_stop(run)
    _clean_up(root, run_id)


def _end(process: int, advice: str) -> bool:
    """Kill a process that does not end by itself within `GRACE_S`. Return whether it was killed."""
    poll = select.poll()
    poll.register(process, select.POLLIN)
    if poll.poll(GRACE_S * 1000):
        return False
    text = f"\ntitan-rl: the run does not react, and is killed; {advice}\n"
    with contextlib.suppress(OSError):  # standard error may be closed
        os.write(2, text.encode())
    signal.pidfd_send_signal(process, signal.SIGKILL)
    return True


def _record_stop(run: Path) -> None:
    from titan_rl.core.run_files import record_immediate_stop

    with contextlib.suppress(OSError):
        record_immediate_stop(run)


def _clean_up(root: Path, run_id: str) -> None:
    """Clean up after the run. The run's other processes end after its own, and release the locks of their folders only
    then."""
    from titan_rl.cluster.hosts.folders import clean_up_after_dead_runs
    from titan_rl.weights.shard_files import shard_folders

    deadline = time.monotonic() + CLEANING_S
    while True:
        clean_up_after_dead_runs(root)
        if not shard_folders(run_id) or time.monotonic() > deadline:
            return
        time.sleep(0.1)


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGHUP):  # schedulers and shells send them to all processes of a job
        signal.signal(number, signal.SIG_IGN)
    watch(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4], *map(Path, sys.argv[5:]))

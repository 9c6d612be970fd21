"""Guard process of a run, which acts when the run's own process cannot.

The guard is notified of every signal that the run's process receives, and of the end of that process. If the process
does not react to a second SIGINT or SIGTERM, because native code holds the GIL, the guard kills it, and records in the
run's `status.json` that the run was stopped. It also reads the pulse of the process: it names a call that holds the
GIL, and if the call cannot be interrupted when its time is up, or soon after one signal, kills the process. If the
process has ended without cleaning up, for one of these reasons or because of a SIGKILL, the guard cleans up instead.

This file runs as a separate program, and imports the rest of titan_rl only when it needs it.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Sequence
from pathlib import Path

SECOND_STOPS = (signal.SIGINT, signal.SIGTERM)
"""Signals of which a second one ends a run at once. A terminal that closes may send several SIGHUPs."""
STOPS = (*SECOND_STOPS, signal.SIGHUP)
ONE_STOP_S = 0.3
"""Time in seconds within which several signals count as one: `timeout` sends its signal both to the process and to the
process group."""
GRACE_S = 1.5  # time for a process to react
CLEANING_S = 20.0
LOOK_S = 1.0
HAS_DESCRIPTORS = hasattr(os, "pidfd_open")

echoes: list[int] = []
"""Descriptors to which the guards of this process write every signal that it receives, the innermost guard last."""


@contextlib.contextmanager
def guarded(
    root: Path, run_id: str, advice: str, run: Path | None = None, *, ends_at_second: bool = True
) -> Generator[None]:
    """Guard this process during the block. Call this in the main thread only. It does nothing if the system lacks
    process descriptors.

    Args:
        root: Folder with the scratch folders.
        run_id: Id in the names of the run's weights in shared memory.
        advice: Advice for the user if the process has to be killed.
        run: Folder of the run whose status then says that it was stopped.
        ends_at_second: Whether the second signal ends the process. Otherwise it does so only if Python code cannot run.
    """
    from titan_rl.core.calls.pulse import PULSE
    from titan_rl.core.plain_data import terminal_text

    if not HAS_DESCRIPTORS:
        yield
        return
    (read, write), (echo, back) = os.pipe(), os.pipe()
    for descriptor in (write, echo, back):
        os.set_blocking(descriptor, False)
    pulse = PULSE.open()
    folder = [] if run is None else [str(run)]
    watches = ["" if pulse is None else str(pulse), "ends" if ends_at_second else "", *folder]
    guard = _start(read, root, run_id, terminal_text(advice), watches, echo=back)
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
    signals: int,
    root: Path,
    run_id: str,
    advice: str,
    watches: Sequence[str] = ("", ""),
    echo: int | None = None,
) -> subprocess.Popen[bytes]:
    process = os.pidfd_open(os.getpid())
    try:
        # A separate session keeps Ctrl-C in the terminal from reaching the guard. -P keeps Python from searching for
        # modules in this file's folder.
        return subprocess.Popen(
            [sys.executable, "-P", __file__, str(process), str(os.getpid()), str(root), run_id, advice, *watches],
            stdin=signals,
            stdout=echo,
            pass_fds=[process],
            start_new_session=True,
        )
    finally:
        os.close(process)


def watch(
    process: int, pid: int, root: Path, run_id: str, advice: str, pulse: str, ends: str, run: Path | None = None
) -> None:
    """Watch a process until it has ended, and clean up after it. Signal numbers arrive on standard input, and are
    written to standard output, which wakes the event loop of the process.

    Args:
        process: Descriptor of the process.
        pulse: `Pulse.descriptor` of the process; "" if it has none.
        ends: Whether the second signal ends the process; "" if only one does that cannot run Python code.
        run: Folder of the run whose status says how it ended if the process has to be killed.
    """
    sys.path.append(str(Path(__file__).parents[3]))
    poll = select.poll()
    poll.register(process, select.POLLIN)
    poll.register(0, select.POLLIN)
    opened: list[_Pulse] = []
    if pulse:  # in a thread, because its imports would make several signals one
        threading.Thread(target=_open_pulse, args=(pid, int(pulse), opened), daemon=True).start()
    num_stops, first, last, killed = 0, math.inf, 0.0, ""
    while True:
        ready = dict(poll.poll(LOOK_S * 1000 if pulse else None))
        watched = opened[0] if opened else None
        if process in ready:
            break
        now = time.monotonic()
        if 0 in ready:
            numbers = os.read(0, 4096)
            if not numbers:  # the run is over, and cleans up by itself
                poll.unregister(0)
            with contextlib.suppress(OSError):  # the pipe is full while no event loop runs
                os.write(1, numbers)
            stops = STOPS if num_stops == 0 else SECOND_STOPS
            if any(number in stops for number in numbers) and now - last > ONE_STOP_S:
                num_stops, first, last = num_stops + 1, min(first, now), now
        if watched is not None:  # also after signals, which an interruption is, too
            killed = killed or watched.look(now, now - first, process, advice)
        if num_stops >= 2 and not killed and (ends or (watched and watched.is_held)):
            killed = _end(process, f"the run does not react, and is killed; {advice}")
    if killed and run is not None:
        _record_end(run, "" if num_stops else killed)
    _clean_up(root, run_id)


def _open_pulse(pid: int, descriptor: int, opened: list[_Pulse]) -> None:
    with contextlib.suppress(OSError):  # the process has ended
        opened.append(_Pulse(pid, descriptor))


class _Pulse:
    """Pulse of the process, and what is done about a call that holds the GIL."""

    def __init__(self, pid: int, descriptor: int) -> None:
        from titan_rl.core.calls.pulse import PulseReader

        self._reader = PulseReader(pid, descriptor, 2 * LOOK_S)
        self.is_held = False

    def look(self, now: float, stopped_s: float, process: int, advice: str) -> str:
        """Name a call that holds the GIL, and end it when its time is up, or soon after a stop signal. Return the
        reason for which the process was killed, or ""."""
        held = self._reader.look(now, stopped_s)
        if held is not None and not held.is_interrupted and not self.is_held:
            _show(
                f"{held}; with rollout.num_workers, environments and rewards have processes of their own, which are "
                "replaced if this happens"
            )
        self.is_held = held is not None
        if held is None or not held.is_late:
            return ""
        if not held.is_lost:
            self._reader.interrupt()
            return ""
        limit = f", longer than its limit of {held.limit_s:g} s" if held.seconds >= held.limit_s else ""
        return _end(process, f"{held}{limit}; {held.advice or f'the run is killed; {advice}'}", 0.0)


def _end(process: int, reason: str, grace_s: float = GRACE_S) -> str:
    """Kill a process that does not end by itself within `grace_s`. Return the reason; "" if it was not killed."""
    poll = select.poll()
    poll.register(process, select.POLLIN)
    if poll.poll(grace_s * 1000):
        return ""
    _show(reason)
    signal.pidfd_send_signal(process, signal.SIGKILL)
    return reason


def _show(text: str) -> None:
    with contextlib.suppress(OSError):  # standard error may be closed
        os.write(2, f"\ntitan-rl: {text}\n".encode())


def _record_end(run: Path, failure: str) -> None:
    from titan_rl.core.run_files import record_immediate_end

    with contextlib.suppress(OSError):
        record_immediate_end(run, failure)


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
    for each in (signal.SIGTERM, signal.SIGHUP):  # schedulers and shells send them to all processes of a job
        signal.signal(each, signal.SIG_IGN)
    process, pid, root, run_id, advice, pulse, ends, *run = sys.argv[1:]
    watch(int(process), int(pid), Path(root), run_id, advice, pulse, ends, *map(Path, run))

"""Commands in separate processes, and the processor time of each process."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")
_PROC = Path("/proc")


def titan_rl(*arguments: str, log: Path) -> subprocess.Popen[bytes]:
    """Start a command of titan-rl. Its output goes to a file. It stays in this session, because Linux divides the
    cores by session, and the other side of the comparison runs in this one."""
    with log.open("wb") as output:
        command = [sys.executable, "-m", "titan_rl.cli.main", *arguments]
        return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)


@dataclass(frozen=True, slots=True)
class CpuUse:
    """Processor time so far, in seconds, by the name of a process's log, or "controller" for the command itself."""

    seconds: Mapping[str, float]

    def since(self, before: CpuUse) -> dict[str, float]:
        return {name: value - before.seconds.get(name, 0.0) for name, value in self.seconds.items()}


def cpu_use(pid: int) -> CpuUse:
    """Processor time of a command and of every process that it has started and that still runs."""
    seconds: dict[str, float] = {}
    for process in _tree([pid]):
        try:
            stat = (_PROC / str(process) / "stat").read_text().rpartition(")")[2].split()
            output = Path(os.readlink(_PROC / str(process) / "fd" / "1"))
        except OSError:  # it has ended
            continue
        name = output.stem if output.parent.name == "logs" else "controller" if process == pid else "others"
        seconds[name] = seconds.get(name, 0.0) + (int(stat[11]) + int(stat[12])) / _TICKS
    return CpuUse(seconds)


def end(session: int, limit_s: float = 60.0) -> None:
    """End the processes of a session, and those that they have started: SIGTERM, with which a run shuts down in order,
    then SIGKILL.

    Args:
        session: Process id of the command that began it.
        limit_s: Time, in seconds, that they have to end after each signal.
    """
    with contextlib.ExitStack() as opened:
        running: list[int] = []
        for process in set(_tree([process for process, _, own in _processes() if own == session])):
            with contextlib.suppress(ProcessLookupError):
                running.append(os.pidfd_open(process))
                opened.callback(os.close, running[-1])
        for number in (signal.SIGTERM, signal.SIGKILL):
            if running:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(session, number)
                running = _still_running(running, limit_s)
        for process in running:  # outside of the group, and of a run, whose guard ends what it has started
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(process, signal.SIGKILL)


def _still_running(processes: Sequence[int], limit_s: float) -> list[int]:
    """File descriptors of the processes that have not ended in time."""
    running = set(processes)
    deadline = time.monotonic() + limit_s
    while running and (left_s := deadline - time.monotonic()) > 0:
        running -= set(select.select(running, [], [], left_s)[0])
    return list(running)


def _processes() -> Iterator[tuple[int, int, int]]:
    """Id, parent and session of each process of the machine."""
    for folder in _PROC.iterdir():
        if folder.name.isdigit():
            try:
                _, parent, _, session, *_ = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it has ended
                continue
            yield int(folder.name), int(parent), int(session)


def _tree(roots: Sequence[int]) -> Sequence[int]:
    """Processes, and those that they have started."""
    children: dict[int, list[int]] = {}
    for process, parent, _ in _processes():
        children.setdefault(parent, []).append(process)
    found: list[int] = []
    waiting = [*roots]
    while waiting:
        found.append(waiting.pop())
        waiting += children.get(found[-1], [])
    return found


def load() -> str:
    """Load of the machine, for a figure's note: the mean number of processes that wanted a core in the last minute."""
    return f"load {os.getloadavg()[0]:.1f} on {len(os.sched_getaffinity(0))} cores"


def wait_for(path: Path, process: subprocess.Popen[bytes], limit_s: float = 300.0) -> None:
    """Wait until a file is there.

    Raises:
        RuntimeError: the command ended before, or it took too long.
    """
    deadline = time.monotonic() + limit_s
    while not path.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"{path} did not appear; the command's exit code is {process.returncode}")
        time.sleep(0.02)

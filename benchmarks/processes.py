"""Commands in separate processes, and the processor time of each process."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
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
    for process in _tree(pid):
        try:
            stat = (_PROC / str(process) / "stat").read_text().rpartition(")")[2].split()
            output = Path(os.readlink(_PROC / str(process) / "fd" / "1"))
        except OSError:  # it has ended
            continue
        name = output.stem if output.parent.name == "logs" else "controller" if process == pid else "others"
        seconds[name] = seconds.get(name, 0.0) + (int(stat[11]) + int(stat[12])) / _TICKS
    return CpuUse(seconds)


def _tree(pid: int) -> Sequence[int]:
    children: dict[int, list[int]] = {}
    for folder in _PROC.iterdir():
        if folder.name.isdigit():
            try:
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(folder.name))
    found: list[int] = []
    waiting = [pid]
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

"""What a process and its children use of a machine, as Linux tells it."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")
_PROC = Path("/proc")
CAN_LIST = (_PROC / "self" / "task" / str(os.getpid()) / "children").exists()
"""Whether the kernel lists the children of a process."""
BUSY_SHARE = 0.1
"""Of one processor. Less is what a process uses that waits, by the threads that keep its connections."""


@dataclass(frozen=True, slots=True)
class TreeUse:
    """Of a process and all below it.

    Args:
        cpu_s: processor time so far, by pid.
        on_disk: one of them waits for a disk.
    """

    cpu_s: dict[int, float]
    on_disk: bool


def use_of(pid: int) -> TreeUse:
    """What is used so far; nothing where the kernel does not tell, or the process is gone."""
    cpu_s: dict[int, float] = {}
    on_disk, ahead = False, [pid]
    while ahead:
        one = ahead.pop()
        try:
            fields = (_PROC / str(one) / "stat").read_text().rpartition(")")[2].split()
            threads = list((_PROC / str(one) / "task").iterdir())
        except OSError:
            continue
        cpu_s[one] = (int(fields[11]) + int(fields[12])) / _TICKS
        for thread in threads:
            try:
                on_disk = on_disk or (thread / "stat").read_text().rpartition(")")[2].split()[0] == "D"
                ahead += [int(child) for child in (thread / "children").read_text().split()]
            except OSError:  # it has ended, or this kernel does not list children
                continue
    return TreeUse(cpu_s, on_disk)


def children_of(pid: int) -> list[int]:
    """Those that it started and that live."""
    return [child for child in _all_children_of(pid) if _state(child) not in ("", "Z", "X")]


def unreaped_children_of(pid: int) -> list[int]:
    """Those that it started, that have ended, and whose ends it has not asked for."""
    return [child for child in _all_children_of(pid) if _state(child) == "Z"]


def is_stopped(pid: int) -> bool:
    """By a signal, as SIGSTOP is one."""
    return _state(pid) == "T"


def _all_children_of(pid: int) -> list[int]:
    found: list[int] = []
    for thread in (_PROC / str(pid) / "task").glob("*/children"):
        with contextlib.suppress(OSError):  # a thread that has ended
            found += [int(child) for child in thread.read_text().split()]
    return found


def _state(pid: int) -> str:
    """A letter, as of `ps`; "" where it is gone."""
    try:
        return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def computed_between(before: TreeUse, after: TreeUse, passed_s: float) -> bool:
    """Whether there was work between two looks that were so far apart. A child that began or ended is some."""
    if after.on_disk or before.cpu_s.keys() != after.cpu_s.keys():
        return True
    used = sum(after.cpu_s[pid] - before.cpu_s[pid] for pid in after.cpu_s)
    return used >= BUSY_SHARE * passed_s

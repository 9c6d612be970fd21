"""Linux's view of the processes of this machine: CPU use, children, and exit with its status."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

_TICKS = os.sysconf("SC_CLK_TCK")
_PROC = Path("/proc")
CAN_LIST = (_PROC / "self" / "task" / str(os.getpid()) / "children").exists()
"""Whether the kernel lists the children of a process."""
BUSY_SHARE = 0.1
"""Share of one processor above which a process counts as computing. Threads that keep an idle process's connections
open use less."""


@dataclass(frozen=True, slots=True)
class TreeUse:
    """CPU and disk use of a process and all its descendants.

    Args:
        cpu_s: Processor time so far in seconds, by pid.
        on_disk: Whether one of them waits for a disk.
    """

    cpu_s: dict[int, float]
    on_disk: bool


def use_of(pid: int) -> TreeUse:
    """Measure a process and its descendants. Empty if the kernel does not report their use, or the process is gone."""
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
    """Pids of the living child processes of a process."""
    return [child for child in _all_children_of(pid) if _state(child) not in ("", "Z", "X")]


def unreaped_children_of(pid: int) -> list[int]:
    """Pids of zombies: child processes that have ended and for which their parent has not waited."""
    return [child for child in _all_children_of(pid) if _state(child) == "Z"]


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal, such as SIGSTOP."""
    return _state(pid) == "T"


def _all_children_of(pid: int) -> list[int]:
    found: list[int] = []
    for thread in (_PROC / str(pid) / "task").glob("*/children"):
        with contextlib.suppress(OSError):  # a thread that has ended
            found += [int(child) for child in thread.read_text().split()]
    return found


def _state(pid: int) -> str:
    """State of a process as a letter, as `ps` shows it; "" if it is gone."""
    try:
        return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def used_cpu_between(before: TreeUse, after: TreeUse, passed_s: float) -> bool:
    """Whether a process computed between two measurements. A child that started or ended counts as computing."""
    if after.on_disk or before.cpu_s.keys() != after.cpu_s.keys():
        return True
    used = sum(after.cpu_s[pid] - before.cpu_s[pid] for pid in after.cpu_s)
    return used >= BUSY_SHARE * passed_s


_INFO_EXIT = 1 << 3  # linux/pidfd.h
_INFO = struct.Struct("=QQ11Ii")  # struct pidfd_info: mask, cgroup, eleven ids, exit code
_GET_INFO = 0xC0000000 | _INFO.size << 16 | 0xFF << 8 | 11  # _IOWR(PIDFS_IOCTL_MAGIC, 11, struct pidfd_info)


def exit_description(descriptor: int) -> str:
    """Describe the end of a process, for example `was killed by SIGKILL`, by a descriptor opened while it lived.

    The status is available while its parent can still wait for it. If the parent has done so already, only Linux 6.15
    and later report the status, and the description is `ended` otherwise.
    """
    status = _status_of_child(descriptor)
    if status is None:
        status = _status_of_zombie(descriptor)
    if status is None:
        status = _status_of_collected(descriptor)
    if status is None:
        return "ended"
    code = os.waitstatus_to_exitcode(status)
    return f"exited with status {code}" if code >= 0 else f"was killed by {_name(-code)}"


def _status_of_child(descriptor: int) -> int | None:
    with contextlib.suppress(ChildProcessError):
        result = os.waitid(os.P_PIDFD, descriptor, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if result is not None:
            return result.si_status << 8 if result.si_code == os.CLD_EXITED else result.si_status
    return None


def _status_of_zombie(descriptor: int) -> int | None:
    """Status of the child of another process that has not waited for it yet."""
    with contextlib.suppress(OSError, ValueError, IndexError, StopIteration):
        information = (_PROC / "self" / "fdinfo" / str(descriptor)).read_text()
        pid = next(int(line.split()[1]) for line in information.splitlines() if line.startswith("Pid:"))
        fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
        if fields[0] == "Z":
            return int(fields[-1])
    return None


def _status_of_collected(descriptor: int) -> int | None:
    with contextlib.suppress(OSError):  # an older kernel
        request = _INFO.pack(_INFO_EXIT, *[0] * 13)
        mask, *_, status = _INFO.unpack(fcntl.ioctl(descriptor, _GET_INFO, request))
        if mask & _INFO_EXIT:
            return status
    return None


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


class EndObserver(Protocol):
    """Receiver of the end of one process."""

    def ended(self, how: str) -> None:
        """Handle the end of the process. Called once, for example with "process 7 was killed by SIGKILL"."""
        ...


class WatchedProcess:
    """Watch on one process of this host, until the process ends or `close` is called. Never confuses it with a later
    process that has the same pid.

    Args:
        observer: Notified in the event loop that is running now.

    Raises:
        ProcessLookupError: There is no such process.
    """

    def __init__(self, pid: int, observer: EndObserver) -> None:
        self.pid = pid
        self._observer = observer
        self._descriptor: int | None = os.pidfd_open(pid)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._descriptor, self._ended)

    def kill(self) -> None:
        if self._descriptor is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)

    def close(self) -> None:
        """Stop watching. An end from now on is intended."""
        if self._descriptor is not None:
            self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = None

    def _ended(self) -> None:
        assert self._descriptor is not None
        how = exit_description(self._descriptor)
        self.close()
        self._observer.ended(f"process {self.pid} {how}")


CAN_WATCH = hasattr(os, "pidfd_open")
"""Whether the kernel reports the ends of processes (pidfd)."""

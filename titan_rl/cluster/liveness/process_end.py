"""How a process ended, as far as the kernel still knows."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import struct

_INFO_EXIT = 1 << 3  # linux/pidfd.h
_INFO = struct.Struct("=QQ11Ii")  # struct pidfd_info: mask, cgroup, eleven ids, exit code
_GET_INFO = 0xC0000000 | _INFO.size << 16 | 0xFF << 8 | 11  # _IOWR(PIDFS_IOCTL_MAGIC, 11, struct pidfd_info)


def how_it_ended(descriptor: int) -> str:
    """Of the process behind a descriptor that was opened while it lived: `was killed by SIGKILL`.

    Nothing is taken from its parent, which may have collected it before: Linux 6.15 and later tell all the same, others
    only that it ended.
    """
    status = _status_of_child(descriptor)
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


def _status_of_collected(descriptor: int) -> int | None:
    with contextlib.suppress(OSError):  # an older kernel
        asked = _INFO.pack(_INFO_EXIT, *[0] * 13)
        mask, *_, status = _INFO.unpack(fcntl.ioctl(descriptor, _GET_INFO, asked))
        if mask & _INFO_EXIT:
            return status
    return None


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"

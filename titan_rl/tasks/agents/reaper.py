"""Kills agent processes, even if the process that started them is gone.

Agents are found by an environment variable, which a process keeps even if it leaves its session or outlives its parent.
This file also runs as a program next to a process that runs agents, and kills them when that process dies. Standard
library only.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Container

VARIABLE = "TITAN_RL_AGENT"
"""Environment variable with the mark of an agent: "<mark of the process that runs it>.<number>"."""

_PASSES = 200
_PAUSE_S = 0.005


def kill_marked(owner: str, marks: Container[str] | None = None) -> None:
    """Kill agents until none is left, since one may fork while others are killed. Killing hundreds takes milliseconds.

    Args:
        owner: Mark of the process that runs the agents.
        marks: Marks of the agents to kill; by default all agents of the owner.
    """
    for _ in range(_PASSES):
        found = False
        for entry in os.scandir("/proc"):
            mark = _mark_of(entry.name) if entry.name.isdigit() else None
            if mark is not None and mark.startswith(f"{owner}.") and (marks is None or mark in marks):
                found = True
                _kill(int(entry.name), mark)
        if not found:
            return
        time.sleep(_PAUSE_S)


def _kill(pid: int, mark: str) -> None:
    """Kill a process if it still has this mark: another process may have its id by now."""
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        return
    try:
        if _mark_of(str(pid)) == mark:
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    except OSError:
        pass
    finally:
        os.close(descriptor)


def _mark_of(pid: str) -> str | None:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            environment = file.read()
    except OSError:  # the process belongs to another user, or has ended
        return None
    _, found, rest = (b"\0" + environment).partition(f"\0{VARIABLE}=".encode())
    return rest.partition(b"\0")[0].decode("utf-8", "replace") if found else None


if __name__ == "__main__":
    while os.read(0, 4096):  # until the owner has ended
        pass
    kill_marked(sys.argv[1])

"""Where Monarch listens."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from monarch.actor import context, enable_transport

from titan_rl.errors import ConfigError


def listen_below(folder: Path) -> None:
    """Have Monarch in this process listen on sockets in a folder, whose mode says who may connect; by default every
    user of the machine may. Before Monarch is first used; later it changes nothing, since Monarch cannot be started
    again. So the folder is to be there for as long as the process.

    What Monarch listens on for the processes that it starts has no such setting: see docs/concepts/security.md.
    """
    with contextlib.suppress(RuntimeError):  # Monarch is in use already
        enable_transport(f"ipc://{folder}/monarch")
    _start(folder)


def listen_on(address: str, folder: Path) -> None:
    """Have Monarch in this process listen where other machines reach it, on a port that the system picks.

    Args:
        address: of an interface of this machine.
        folder: as of `listen_below`, for the sockets of processes on this machine.

    Raises:
        ConfigError: this process has no such address, or has used Monarch before and listens elsewhere.
    """
    transport = f"tcp://{f'[{address}]' if ':' in address else address}:0"
    try:
        enable_transport(transport)
    except RuntimeError:
        raise ConfigError(
            "hosts: Monarch listens already for runs on this machine alone, and cannot be started again; start a run "
            "with other hosts in a process of its own"
        ) from None
    _start(folder)


def _start(folder: Path) -> None:
    before = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = str(folder)  # it makes a folder there for the sockets of the processes that it starts
    try:
        context()
    finally:
        if before is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = before

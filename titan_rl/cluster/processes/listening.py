"""Where Monarch listens."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path

from monarch.actor import context, enable_transport

from titan_rl.cluster.processes.private_sockets import bind_below
from titan_rl.core.calls.plain import terminal_text
from titan_rl.core.errors import ConfigError

LOG_NOTICE = b"Monarch internal logs are being written to "


def listen_below(folder: Path) -> None:
    """Have Monarch in this process listen on sockets in a folder, whose mode says who may connect; by default every
    user of the machine may. Before Monarch is first used; later it changes nothing, since Monarch cannot be started
    again. So the folder is to be there for as long as the process.
    """
    with contextlib.suppress(RuntimeError):  # Monarch is in use already
        enable_transport(f"ipc://{folder}/monarch")
    _start(folder)


def listen_on(address: str, folder: Path) -> None:
    """Have Monarch in this process listen where other machines reach it, on a port that the system picks.

    Args:
        address: of an interface of this machine.
        folder: as of `listen_below`, for the sockets between processes of this machine.

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


@contextlib.contextmanager
def without_log_notice() -> Generator[None]:
    """Keep Monarch's line about its log, which it writes to standard error when it starts, from getting there. What
    else is written there within the block comes out at its end."""
    sys.stderr.flush()
    with tempfile.TemporaryFile() as held, contextlib.ExitStack() as resources:
        terminal = os.dup(2)
        resources.callback(os.close, terminal)
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(terminal, 2)
            held.seek(0)
            for line in held:
                if not line.startswith(LOG_NOTICE):
                    os.write(2, terminal_text(line.decode(errors="replace")).encode())


def _start(folder: Path) -> None:
    bind_below(folder)
    before = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = str(folder)  # it makes a folder there for the sockets of the processes that it starts
    try:
        with without_log_notice():
            context()
    finally:
        if before is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = before

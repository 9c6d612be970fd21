"""Where Monarch listens."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from monarch.actor import context, enable_transport


def listen_below(folder: Path) -> None:
    """Have Monarch in this process listen on sockets in a folder, whose mode says who may connect; by default every
    user of the machine may. Before Monarch is first used; later it changes nothing, since Monarch cannot be started
    again. So the folder is to be there for as long as the process.

    What Monarch listens on for the processes that it starts has no such setting: see docs/security.md.
    """
    with contextlib.suppress(RuntimeError):  # Monarch is in use already
        enable_transport(f"ipc://{folder}/monarch")
    before = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = str(folder)  # it makes a folder there for the sockets of the processes that it starts
    try:
        context()
    finally:
        if before is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = before

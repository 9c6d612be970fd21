"""Where Monarch listens."""

from __future__ import annotations

import contextlib
from pathlib import Path

from monarch.actor import enable_transport


def listen_below(folder: Path) -> None:
    """Have Monarch's gateway in this process listen on a socket in a folder, whose mode says who may connect; by
    default every user of the machine may. Before Monarch is first used; later it changes nothing.

    What Monarch listens on for the processes that it starts has no such setting: see docs/security.md.
    """
    with contextlib.suppress(RuntimeError):  # Monarch is in use already
        enable_transport(f"ipc://{folder}/monarch")

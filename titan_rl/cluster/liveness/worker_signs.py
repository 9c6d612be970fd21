"""What a `titan-rl worker` and the agents of the runs on its host have in common: a folder of the worker's own."""

from __future__ import annotations

import os
from pathlib import Path

FOLDER = "TITAN_RL_WORKER"
"""The variable that has the folder, for what the worker starts."""
_LEAVING = "leaving"


def say_leaving(folder: Path, reason: str) -> None:
    """Of the worker: the host is about to go."""
    fresh = folder / f".{_LEAVING}"
    fresh.write_text(reason)
    fresh.replace(folder / _LEAVING)


def leaving() -> str:
    """Of an agent: why the host is about to go; "" while it stays."""
    folder = os.environ.get(FOLDER)
    if folder is None:
        return ""
    try:
        return (Path(folder) / _LEAVING).read_text()
    except OSError:
        return ""

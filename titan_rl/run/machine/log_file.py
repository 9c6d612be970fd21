"""The log of a command's own process."""

from __future__ import annotations

import logging
from pathlib import Path

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def log_to(path: Path) -> None:
    """Have everything that is logged go to a file, and nothing to the terminal."""
    logging.basicConfig(filename=path, level=logging.INFO, format=LOG_FORMAT, force=True)
    logging.raiseExceptions = False  # a log that has no room on the disk is no news for the screen at every line

"""The log of a command's own process."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Generator
from pathlib import Path

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def log_to(path: Path) -> None:
    """Have everything that is logged go to a file, and nothing to the terminal."""
    logging.basicConfig(filename=path, level=logging.INFO, format=LOG_FORMAT, force=True)
    logging.raiseExceptions = False  # a log that has no room on the disk is no news for the screen at every line


@contextlib.contextmanager
def logging_to(path: Path) -> Generator[None]:
    """`log_to` for the length of the block, in a program that has a log of its own. Its handlers are kept."""
    root = logging.getLogger()
    handlers, level, raises = root.handlers[:], root.level, logging.raiseExceptions
    root.handlers.clear()  # which are closed where they are replaced
    log_to(path)
    try:
        yield
    finally:
        for handler in root.handlers[:]:
            root.removeHandler(handler)
            with contextlib.suppress(OSError):  # of lines that a full disk has not taken
                handler.close()
        root.handlers[:] = handlers
        root.setLevel(level)
        logging.raiseExceptions = raises

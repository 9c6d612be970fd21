"""Console: lines for the user of a command, and their verbosity."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from enum import IntEnum

logger = logging.getLogger(__name__)


class Verbosity(IntEnum):
    """Amount of output of a command."""

    QUIET = 0  # warnings and the result
    NORMAL = 1
    VERBOSE = 2  # log messages, too


class Console:
    """Output for the user of a command. All methods are thread-safe. This class writes the lines to the log, and its
    subclasses to a screen."""

    def message(self, text: str) -> None:
        """Show a line, unless the command is quiet."""
        logger.info("%s", text)

    def warning(self, text: str) -> None:
        """Show a line, also if the command is quiet."""
        logger.warning("%s", text)


LOG = Console()
"""Console of code without a screen."""


class ConsoleLines(list[str], Console):
    """Console that collects its lines, for tests."""

    def message(self, text: str) -> None:
        self.append(text)

    def warning(self, text: str) -> None:
        self.append(text)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table whose columns are aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]

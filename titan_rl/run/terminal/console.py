"""Where lines for a person are written."""

from __future__ import annotations

import logging
import sys
from typing import TextIO

from rich.console import Console

from titan_rl.run.terminal.standard_streams import silence

logger = logging.getLogger(__name__)


class ForgivingConsole(Console):
    """Falls silent where nobody reads any more, or the disk is full: that ends no run."""

    def __init__(self, file: TextIO) -> None:
        super().__init__(file=file, highlight=False, soft_wrap=True)

    def _check_buffer(self) -> None:
        try:
            super()._check_buffer()
        except OSError as error:
            self._fall_silent(error)

    def on_broken_pipe(self) -> None:
        self._fall_silent(BrokenPipeError("nobody reads the output"))

    def _fall_silent(self, error: OSError) -> None:
        self.quiet = True
        logger.warning("the output cannot be written, and the run goes on without it: %r", error)
        for stream in (sys.stdout, sys.stderr):
            if self.file is stream:
                silence(stream)

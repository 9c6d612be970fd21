"""Where lines for a person are written."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable
from typing import TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from titan_rl.core.calls.plain import terminal_text
from titan_rl.run.terminal.standard_streams import silence

logger = logging.getLogger(__name__)


class ForgivingConsole(Console):
    """Console that falls silent where nobody reads any more, or the disk is full: that ends no run. Control characters
    in what is printed are escaped; only the console's own reach the terminal."""

    def __init__(self, file: TextIO) -> None:
        super().__init__(file=file, highlight=False, soft_wrap=True)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(terminal_text(segment.text), segment.style)

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

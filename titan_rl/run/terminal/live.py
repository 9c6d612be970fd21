"""Live lines at the bottom of a terminal, and the console that they are drawn on."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Sequence
from math import ceil
from typing import Protocol, TextIO

from rich.console import Console, ConsoleOptions, ConsoleRenderable, Group, RenderableType
from rich.live import Live
from rich.segment import Segment
from rich.text import Text

from titan_rl.core.calls.plain import terminal_text
from titan_rl.run.terminal.standard_streams import silence

logger = logging.getLogger(__name__)


class ForgivingConsole(Console):
    """Console that stops writing if the reader is gone or the disk is full, which ends no run. Control characters in
    printed text are escaped; only the console's own reach the terminal."""

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


REFRESHES_PER_S = 4


class Display(Protocol):
    """Source of live lines."""

    def lines(self) -> Sequence[Text]:
        """Lines to draw now. Called in a thread of the display."""
        ...


class LiveLines(Live):
    """Lines at the bottom of a terminal. Other output scrolls above them, also output of code that does not know of
    them. `stop` draws the lines for the last time.

    A terminal that becomes narrower breaks the lines on it into more rows than were drawn; all of them are replaced.

    Args:
        vanish: nothing is left of them at the end.
    """

    def __init__(self, console: Console, display: Display, *, vanish: bool = False) -> None:
        self._display = display
        self._asked: Sequence[Text] = ()
        self._drawn: Sequence[Text] = ()
        self._width = console.width
        super().__init__(
            console=console,
            transient=vanish,
            refresh_per_second=REFRESHES_PER_S,
            get_renderable=self._lines,
            redirect_stdout=sys.stdout.isatty(),  # what is piped goes on into the pipe
            redirect_stderr=sys.stderr.isatty(),
        )

    def _lines(self) -> Group:
        self._asked = self._display.lines()
        return Group(*self._asked)

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        width = self.console.width
        drawn = self._live_render
        if width < self._width and drawn._shape is not None:
            rows = sum(max(1, ceil(line.cell_len / width)) for line in self._drawn)
            drawn._shape = (width, max(rows, 1))
        self._width = width
        processed = super().process_renderables(renderables)
        self._drawn = self._asked
        return processed

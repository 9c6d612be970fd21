"""Lines at the bottom of a terminal that are drawn again and again, below everything else that is printed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from math import ceil

from rich.console import Console, ConsoleRenderable, Group
from rich.live import Live
from rich.text import Text

REFRESHES_PER_S = 4


class LiveLines:
    """What is printed on the terminal meanwhile, also by code that knows nothing of this, scrolls above the lines.

    Args:
        lines: what to draw, asked for by a thread of its own.
        vanish: nothing is left of them at the end.
    """

    def __init__(self, console: Console, lines: Callable[[], Sequence[Text]], *, vanish: bool = False) -> None:
        self._live = _ResizedLive(console, lines, vanish=vanish)

    def start(self) -> None:
        self._live.start(refresh=True)

    def refresh(self) -> None:
        self._live.refresh()

    def stop(self) -> None:
        """Draw the lines for the last time, and leave the terminal as it was."""
        self._live.stop()


class _ResizedLive(Live):
    """A terminal that becomes narrower breaks the lines that are there into more rows than were drawn; all of them are
    to be replaced."""

    def __init__(self, console: Console, lines: Callable[[], Sequence[Text]], *, vanish: bool) -> None:
        self._ask = lines
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
        self._asked = self._ask()
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

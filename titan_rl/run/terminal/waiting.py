"""Line on a terminal that says what a command is waiting for, before there is a live display.

It needs only the standard library, because most of the waiting is for imports.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Generator
from typing import TextIO

SHOWN_AFTER_S = 0.3
"""Seconds without output after which a terminal is considered idle."""

_ERASE = "\r\x1b[K"


class WaitingLine:
    """Last line of a terminal, drawn while nothing else is written. Any thread may call the methods.

    Args:
        file: Terminal to write to. Defaults to standard error.
        after_s: Seconds without output after which the line is drawn.
    """

    def __init__(self, file: TextIO | None = None, after_s: float = SHOWN_AFTER_S) -> None:
        self._file = file
        self._after_s = after_s
        self._lock = threading.RLock()
        self._text: str | None = None
        self._timer: threading.Timer | None = None
        self._is_drawn = False

    @contextlib.contextmanager
    def shown(self, text: str) -> Generator[None]:
        """Draw a line on an idle terminal during the block. An inner block replaces the line of an outer block."""
        before = self._text
        self._set(text)
        try:
            yield
        finally:
            self._set(before)

    def erase(self) -> None:
        """Remove the line, because something else is about to be written. It is drawn again when the terminal becomes
        idle."""
        with self._lock:
            if self._text is not None:
                self._set(self._text)

    def _set(self, text: str | None) -> None:
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            if self._is_drawn:
                self._write(_ERASE)
                self._is_drawn = False
            self._text = text
            if text is not None and self._can_erase():
                self._timer = threading.Timer(self._after_s, self.draw)
                self._timer.daemon = True
                self._timer.start()

    def draw(self) -> None:
        """Draw the line now, if the terminal is able to erase it and does not already show it."""
        with self._lock:
            if self._text is not None and not self._is_drawn and self._can_erase():
                self._write(f"{_ERASE}titan-rl: {self._text} ...")
                self._is_drawn = True

    def _can_erase(self) -> bool:
        return (self._file or sys.stderr).isatty() and os.environ.get("TERM") not in (None, "", "dumb")

    def _write(self, text: str) -> None:
        file = self._file or sys.stderr
        with contextlib.suppress(OSError, ValueError):  # the reader may be gone
            file.write(text)
            file.flush()


WAITING = WaitingLine()
"""Waiting line on this process's standard error."""

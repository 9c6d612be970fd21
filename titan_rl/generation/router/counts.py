"""Counter of the requests in flight."""

from __future__ import annotations

import contextlib
from collections.abc import Generator


class HighWaterMark:
    """High-water mark of a counter: counts open blocks, and keeps the largest count until it is taken.

    Example: after two blocks were open at once, of which one still is, `take()` is 2, and 1 if called again.
    """

    def __init__(self) -> None:
        self.now = 0
        self.num_done = 0  # blocks that ended without an error
        self._most = 0

    @contextlib.contextmanager
    def one(self) -> Generator[None]:
        self.now += 1
        self._most = max(self._most, self.now)
        try:
            yield
            self.num_done += 1
        finally:
            self.now -= 1

    def take(self) -> int:
        """The largest count since this was last called."""
        most, self._most = self._most, self.now
        return most

"""Answers what is asked about the traces of one run."""

from __future__ import annotations

import math
import threading
from pathlib import Path
from typing import Any

import msgspec

from titan_rl.viewer.trace.events import Traces
from titan_rl.viewer.trace.timeline import timeline

WIDTHS = (1000, 300, 100)
"""Pixels that a timeline is kept in, the first that there is room for."""


class TraceReader:
    """The traces of a run, read as far as they are written. Threads may share one.

    Args:
        folder: of the run.
    """

    def __init__(self, folder: Path) -> None:
        self._lock = threading.Lock()
        self._traces = Traces(folder / "trace")
        self._changes = 0

    def look(self) -> int:
        """Differs once there is more, or less. Nothing is read."""
        with self._lock:
            self._changes += self._traces.has_grown()
            return self._changes

    def timeline(
        self,
        first: float | None = None,
        last: float | None = None,
        width: int = 1000,
        seen: tuple[float, float] | None = None,
        patience_s: float = math.inf,
    ) -> dict[str, Any]:
        """See `timeline`, of what is read within `patience_s`."""
        with self._lock:
            return timeline(self._traces, first, last, width, seen, patience_s)

    def small_timeline(self, most_bytes: int) -> dict[str, Any] | None:
        """All of it, as JSON of at most so many bytes; None where there is no room for it, or no trace."""
        found: dict[str, Any] = {}
        for width in WIDTHS:
            found = self.timeline(width=width)
            if not found["lanes"]:
                return None
            if len(msgspec.json.encode(found)) <= most_bytes:
                return found
        found["lanes"] = [lane for lane in found["lanes"] if lane["kind"] not in ("environment", "reward", "request")]
        return found if len(msgspec.json.encode(found)) <= most_bytes else None

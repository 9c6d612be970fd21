"""Who reads the weights in another thread, and the wait for them before a weight changes."""

from __future__ import annotations

import time
from concurrent.futures import Future, wait
from typing import Any

from titan_rl.core.errors import TrainingError

LIMIT_S = 300.0
"""Longest wait."""


class Readers:
    """Reads that have begun, each until its future is done."""

    def __init__(self) -> None:
        self._reads: list[Future[Any]] = []

    def add(self, read: Future[Any]) -> None:
        self._reads.append(read)

    def wait(self) -> float:
        """Wait for all reads. How they ended is for those who began them.

        Returns:
            seconds waited; exactly 0 where there was no read.

        Raises:
            TrainingError: one does not come to its end.
        """
        if not self._reads:
            return 0.0
        began = time.monotonic()
        if pending := wait(self._reads, timeout=LIMIT_S).not_done:
            raise TrainingError(
                f"{len(pending)} copies of the weights have not ended after {LIMIT_S:g} s; no weight may change before"
            )
        self._reads.clear()
        return time.monotonic() - began

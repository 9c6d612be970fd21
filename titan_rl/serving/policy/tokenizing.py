"""Tokenizing beside an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

SHORT = 1 << 16
"""Characters that are tokenized within some milliseconds, for which the event loop can wait."""


class Tokenizing:
    """Calls that tokenize, one at a time: short ones at once, long ones in a thread, and short ones meanwhile behind
    them. A call that is cancelled while it runs has no result."""

    def __init__(self) -> None:
        self._one_at_a_time = threading.Lock()
        self._thread = ThreadPoolExecutor(1, "tokenizing")

    async def __call__(self, call: Callable[[], T], num_characters: int) -> T:
        if num_characters <= SHORT and self._one_at_a_time.acquire(blocking=False):
            try:
                return call()
            finally:
                self._one_at_a_time.release()
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._alone, call)

    def _alone(self, call: Callable[[], T]) -> T:
        with self._one_at_a_time:
            return call()

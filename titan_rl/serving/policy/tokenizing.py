"""Tokenizing beside an event loop."""

from __future__ import annotations

import asyncio
import copy
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, cast

logger = logging.getLogger(__name__)
T = TypeVar("T")

SHORT = 1 << 16
"""Characters that are tokenized within some milliseconds, for which the event loop can wait."""


class Tokenizing:
    """Calls that tokenize: short ones at once, and long ones in a thread, one after the other. A call that is cancelled
    while it runs has no result.

    No tokenizer or renderer may be used by two threads at once. The thread therefore has copies of those that calls
    use, which is why they use what `own` returns. Where one cannot be copied, short calls wait for a long one.

    Example:

        tokenizing = Tokenizing()
        tokenizer = tokenizing.own(tokenizer)
        token_ids = await tokenizing(lambda: tokenizer.encode(text), len(text))
    """

    def __init__(self) -> None:
        self._owned: list[Any] = []
        self._of_thread = threading.local()
        self._originals_in_use = threading.Lock()
        self._can_copy = True
        self._thread = ThreadPoolExecutor(1, "tokenizing")

    def own(self, used: T) -> T:
        """Stands for a tokenizer or renderer in calls: the original on the event loop, and a copy in the thread."""
        if isinstance(used, _Owned):
            return used
        self._owned.append(used)
        return cast("T", _Owned(self, len(self._owned) - 1))

    def held(self, used: T) -> T:
        """The object itself that the current thread uses for what `own` returned."""
        return cast("T", self.present(used.index)) if isinstance(used, _Owned) else used

    def present(self, index: int) -> Any:
        """What the current thread uses for what was owned as this."""
        return getattr(self._of_thread, "copies", self._owned)[index]

    async def __call__(self, call: Callable[[], T], num_characters: int) -> T:
        if num_characters <= SHORT and self._originals_in_use.acquire(blocking=False):
            try:
                return call()
            finally:
                self._originals_in_use.release()
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._aside, call)

    def _aside(self, call: Callable[[], T]) -> T:
        with self._originals_in_use:
            if not self._has_copies():
                return call()
        return call()

    def _has_copies(self) -> bool:
        if self._can_copy and not hasattr(self._of_thread, "copies"):
            try:
                self._of_thread.copies = copy.deepcopy(self._owned)  # all at once: a renderer may hold the tokenizer
            except Exception as error:  # a renderer of the user's may hold anything
                logger.info("short texts wait for long ones to be tokenized: no copy can be made: %r", error)
                self._can_copy = False
        return self._can_copy


class _Owned:
    def __init__(self, tokenizing: Tokenizing, index: int) -> None:
        self._tokenizing = tokenizing
        self.index = index

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizing.present(self.index), name)

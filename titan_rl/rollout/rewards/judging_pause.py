"""What becomes of judges while generation is paused."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")


class JudgingPause:
    """Judges at work when a pause begins may finish within its grace period; they are then cancelled, and begin anew
    when it ends. Those that come later wait for its end.

    Args:
        grace_s: length of the grace period.
        limit_s: how long a judge waits for the end before it goes on regardless.
    """

    def __init__(self, grace_s: float, limit_s: float) -> None:
        self._grace_s = grace_s
        self._limit_s = limit_s
        self._over = asyncio.Event()
        self._over.set()
        self._grace: asyncio.TimerHandle | None = None
        self._at_work: set[asyncio.Timeout] = set()

    def begin(self) -> None:
        """Begin the grace period. One that has begun goes on."""
        if self._over.is_set():
            self._over.clear()
            self._grace = asyncio.get_running_loop().call_later(self._grace_s, self._cancel_all)

    def end(self) -> None:
        if self._grace is not None:
            self._grace.cancel()
        self._over.set()

    async def judge(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The result of `work()`, which is called again each time a pause has cancelled it. A cancellation of the
        caller ends it, whenever it comes."""
        while True:
            if not self._over.is_set():
                await self._wait()
            scope = asyncio.timeout(None)
            try:
                async with scope:
                    self._at_work.add(scope)
                    try:
                        return await work()
                    finally:
                        self._at_work.discard(scope)
            except TimeoutError:
                if not scope.expired():
                    raise

    def _cancel_all(self) -> None:
        for scope in self._at_work:
            scope.reschedule(asyncio.get_running_loop().time())
        if self._at_work:
            logger.warning("cancelled %d rewards %g s into a pause; they begin anew", len(self._at_work), self._grace_s)

    async def _wait(self) -> None:
        try:
            async with asyncio.timeout(self._limit_s):
                await self._over.wait()
        except TimeoutError:
            logger.warning("the pause has lasted %g s; judging goes on regardless", self._limit_s)

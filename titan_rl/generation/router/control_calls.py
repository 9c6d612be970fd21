"""Calls to a router that wait for something, and fail when it is closed meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from titan_rl.core.errors import EngineDeadError


class ControlCalls:
    """Those under way: pulls, pauses, aborts."""

    def __init__(self) -> None:
        self._ended: EngineDeadError | None = None
        self._under_way: set[asyncio.Timeout] = set()

    @asynccontextmanager
    async def one(self) -> AsyncGenerator[None]:
        """The block is a call.

        Raises:
            EngineDeadError: by the block, that of `end`, before it or while it runs.
        """
        if self._ended is not None:
            raise self._ended
        async with asyncio.timeout(None) as scope:
            self._under_way.add(scope)
            try:
                yield
            except asyncio.CancelledError:
                if scope.expired() and self._ended is not None:
                    raise self._ended from None
                raise
            finally:
                self._under_way.discard(scope)

    def end(self, reason: EngineDeadError) -> bool:
        """From now on calls fail with `reason`. False where they do already: the first one stands."""
        if self._ended is not None:
            return False
        self._ended = reason
        for scope in self._under_way:
            scope.reschedule(asyncio.get_running_loop().time())
        return True

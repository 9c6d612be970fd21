"""Samples that wait for harnesses that run elsewhere."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from titan_rl.core.errors import BusyError
from titan_rl.serving.episode import Episode
from titan_rl.serving.episode_store import Opened
from titan_rl.serving.http.errors import ApiError


class WaitingSamples:
    """Gives each harness that asks the sample that has waited longest."""

    def __init__(self) -> None:
        self._offers: deque[tuple[Opened, asyncio.Event]] = deque()
        self._more = asyncio.Condition()
        self._closed = False

    @contextmanager
    def offered(self, episode: Episode, sample: Any) -> Generator[asyncio.Event]:
        """Within the block a harness may take it, which sets the event."""
        offer = Opened(episode, sample), asyncio.Event()
        self._offers.append(offer)
        waking = asyncio.ensure_future(self._wake())
        try:
            yield offer[1]
        finally:
            waking.cancel()
            if offer in self._offers:
                self._offers.remove(offer)

    async def take(self, wait_s: float) -> Opened:
        """
        Args:
            wait_s: longest wait for one, where there is none.

        Raises:
            BusyError: there is none.
            ApiError: 503, the run is over.
        """
        async with self._more:
            try:
                async with asyncio.timeout(wait_s):
                    await self._more.wait_for(lambda: bool(self._offers) or self._closed)
            except TimeoutError:
                if not self._offers:
                    raise BusyError("no sample waits for a harness; ask again, or with a longer wait_s") from None
        if self._closed:
            raise ApiError(503, "the run is over", code="run_over")
        opened, taken = self._offers.popleft()
        taken.set()
        return opened

    async def close(self) -> None:
        """The run is over, for those that wait and those that come later."""
        self._closed = True
        async with self._more:
            self._more.notify_all()

    async def _wake(self) -> None:
        async with self._more:
            self._more.notify()

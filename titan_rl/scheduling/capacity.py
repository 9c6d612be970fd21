"""How many rollouts are in flight: what lets the next group start as soon as enough siblings of others are done."""

from __future__ import annotations

import asyncio


class RolloutCapacity:
    """Counts rollouts in flight, against an optional limit. First come, first served."""

    def __init__(self, limit: int | None) -> None:
        self.in_flight = 0
        self._limit = limit
        self._freed = asyncio.Event()
        self._turn = asyncio.Lock()

    async def take(self, count: int) -> None:
        """Wait until `count` more fit. What is larger than the limit starts when nothing else is in flight."""
        async with self._turn:
            while not self._fits(count):
                self._freed.clear()
                await self._freed.wait()
            self.in_flight += count

    def take_again(self, count: int) -> None:
        """Count rollouts that go on after a suspension. They were let in long ago, and wait for nobody."""
        self.in_flight += count

    def give_back(self, count: int) -> None:
        assert 0 <= count <= self.in_flight, "what is in flight is given back exactly once"
        self.in_flight -= count
        self._freed.set()

    def _fits(self, count: int) -> bool:
        return self._limit is None or self.in_flight == 0 or self.in_flight + count <= self._limit

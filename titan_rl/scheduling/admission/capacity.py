"""How many rollouts are in flight: what lets the next group start as soon as enough siblings of others are done."""

from __future__ import annotations

import asyncio


class RolloutPermits:
    """So many rollouts of one group may be in flight. What is given back is what is held and nothing more, however
    often that is asked for."""

    def __init__(self, capacity: RolloutCapacity | None = None, count: int = 0) -> None:
        self.count = count
        self._capacity = capacity

    def keep(self, count: int) -> None:
        """Give back what is held beyond `count`."""
        surplus = self.count - count
        if surplus > 0 and self._capacity is not None:
            self.count = count
            self._capacity._give_back(surplus)  # pyright: ignore[reportPrivateUsage]


class RolloutCapacity:
    """Counts rollouts in flight, against an optional limit. First come, first served."""

    def __init__(self, limit: int | None) -> None:
        self.in_flight = 0
        self._limit = limit
        self._freed = asyncio.Event()
        self._turn = asyncio.Lock()

    async def take(self, count: int) -> RolloutPermits:
        """Wait until `count` more fit. What is larger than the limit starts when nothing else is in flight."""
        async with self._turn:
            while not self._fits(count):
                self._freed.clear()
                await self._freed.wait()
            self.in_flight += count
        return RolloutPermits(self, count)

    def _give_back(self, count: int) -> None:
        self.in_flight -= count
        self._freed.set()

    def _fits(self, count: int) -> bool:
        return self._limit is None or self.in_flight == 0 or self.in_flight + count <= self._limit

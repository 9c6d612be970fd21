"""Slots: what bounds how many groups are admitted and not yet trained on."""

from __future__ import annotations

import asyncio


class Slot:
    """The right to hold one group. Given back exactly once."""

    def __init__(self, pool: SlotPool) -> None:
        self._pool: SlotPool | None = pool

    def release(self) -> None:
        assert self._pool is not None, "a slot is given back exactly once"
        pool, self._pool = self._pool, None
        pool._give_back()  # pyright: ignore[reportPrivateUsage]


class SlotPool:
    """A fixed number of slots, granted first come, first served."""

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ValueError(f"SlotPool.size is {size}; it must be at least 1")
        self.size = size
        self._free = asyncio.Semaphore(size)
        self._held = 0

    @property
    def held(self) -> int:
        return self._held

    @property
    def free(self) -> int:
        return self.size - self._held

    async def acquire(self) -> Slot:
        await self._free.acquire()
        self._held += 1
        return Slot(self)

    def _give_back(self) -> None:
        self._held -= 1
        self._free.release()

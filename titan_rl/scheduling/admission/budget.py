"""How many groups a scheduler is still to admit and to hand out."""

from __future__ import annotations

import asyncio


class Budget:
    """So many groups are trained on. Each is admitted once, and another one for each that is dropped.

    Raises:
        ValueError: it is negative.
    """

    def __init__(self, num_groups: int) -> None:
        if num_groups < 0:
            raise ValueError(f"GroupScheduler budget is {num_groups}; it must not be negative")
        self._left = num_groups
        self._admissible = asyncio.Semaphore(num_groups)
        self._used_up = asyncio.Event()
        self.hand_out(0)

    @property
    def left(self) -> int:
        """Groups that batches are still to be made of."""
        return self._left

    @property
    def may_admit(self) -> bool:
        return not self._admissible.locked()

    async def admit(self) -> None:
        """Wait until another group may be admitted."""
        await self._admissible.acquire()

    def replace(self) -> None:
        """One that was admitted is dropped."""
        self._admissible.release()

    def hand_out(self, num_groups: int) -> None:
        """So many are in a batch."""
        self._left = max(0, self._left - num_groups)
        if not self._left:
            self._used_up.set()

    async def wait_used_up(self) -> None:
        """Returns when all of them are in batches."""
        await self._used_up.wait()

"""Backoff: growing pauses between retries of a call, within a time limit for all of them."""

from __future__ import annotations

import asyncio
import math


class Backoff:
    """Pauses before the retries of one call. Each is twice as long as the one before, up to a limit.

    Example:

        backoff = Backoff(0.5, 30.0, limit_s=900.0)
        while True:
            try:
                async with asyncio.timeout(backoff.left_s):
                    return await ask()
            except GenerationError:
                if backoff.is_over:
                    raise
            await backoff.pause()

    Args:
        first_s: Length of the first pause.
        longest_s: Length of the longest pause.
        limit_s: Time for all attempts and pauses, from now on.
    """

    def __init__(self, first_s: float, longest_s: float, *, limit_s: float = math.inf) -> None:
        self.next_s = first_s
        self._longest_s = longest_s
        self._clock = asyncio.get_running_loop().time
        self._ends_at = self._clock() + limit_s

    @property
    def left_s(self) -> float | None:
        """Time left for the next attempt; None without a limit."""
        return None if math.isinf(self._ends_at) else max(0.0, self._ends_at - self._clock())

    @property
    def is_over(self) -> bool:
        """Whether no time would be left for an attempt after the next pause."""
        return self._clock() + self.next_s > self._ends_at

    async def pause(self) -> None:
        await asyncio.sleep(self.next_s)
        self.next_s = min(2 * self.next_s, self._longest_s)

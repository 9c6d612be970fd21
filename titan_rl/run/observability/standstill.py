"""Tells when nothing happens any more, and what is waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

AFTER_S = 30.0
LOOK_S = 5.0


class Standstill:
    """What happens in a run is answers, tokens, rollouts and steps. Where there is none of it for a while, a person is
    told, again after twice the time and so on, and once it goes on.

    Args:
        progress: anything that differs once something has happened.
        waits_for: says what the run waits for.
    """

    def __init__(
        self,
        progress: Callable[[], object],
        waits_for: Callable[[], str],
        tell: Callable[[str], object],
        *,
        after_s: float = AFTER_S,
    ) -> None:
        self._progress = progress
        self._waits_for = waits_for
        self._tell = tell
        self._after_s = after_s

    async def watch(self) -> None:
        """Until it is cancelled."""
        clock = asyncio.get_running_loop().time
        last, since, limit = self._progress(), clock(), self._after_s
        while True:
            await asyncio.sleep(min(LOOK_S, self._after_s))
            now, seconds = self._progress(), clock() - since
            if now != last:
                if limit > self._after_s:
                    self._tell(f"it goes on, after {seconds:.0f} s")
                last, since, limit = now, clock(), self._after_s
            elif seconds >= limit:
                self._tell(f"nothing has happened for {seconds:.0f} s: {self._waits_for()}")
                limit *= 2

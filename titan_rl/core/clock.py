"""Clock objects, so that a test can run in virtual time (`titan_rl.testing.clock.ManualClock`)."""

from __future__ import annotations

import asyncio
import time


class Clock:
    """Clock of this machine."""

    def now(self) -> float:
        """Seconds since an arbitrary moment; never steps back, and does not advance while the machine sleeps."""
        return time.monotonic()

    def now_ns(self) -> int:
        """`now` in nanoseconds."""
        return time.monotonic_ns()

    def wall(self) -> float:
        """Seconds since 1970, which jump when the system's time is set."""
        return time.time()


CLOCK = Clock()


class LoopClock(Clock):
    """Clock of the running event loop, which is virtual in simulations."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()

    def now(self) -> float:
        return self._loop.time()

    def now_ns(self) -> int:
        return round(self.now() * 1e9)

"""How the clocks of another host stand to those of this machine."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

LIMIT_S = 0.5
"""Wall clocks that are farther apart are told of: whoever reads the logs of two hosts side by side is misled."""
ASKED = 5


@dataclass(frozen=True, slots=True)
class Clocks:
    """What both clocks of one machine said at one moment: `wall_ns` since 1970, and `steady_ns`, which never steps,
    since whenever."""

    wall_ns: int
    steady_ns: int

    @staticmethod
    def now() -> Clocks:
        return Clocks(time.time_ns(), time.monotonic_ns())


@dataclass(frozen=True, slots=True)
class ClockDifference:
    """Of another host from this machine.

    Attributes:
        wall_s: how far its wall clock is ahead.
        steady_ns: how far the one is ahead that never steps.
        within_s: half the round trip, which is how wrong either may be.
    """

    wall_s: float
    steady_ns: int
    within_s: float

    @property
    def matters(self) -> bool:
        return abs(self.wall_s) > LIMIT_S + self.within_s

    def __str__(self) -> str:
        side = "ahead of" if self.wall_s > 0 else "behind"
        return f"{abs(self.wall_s):.3g} s {side} this machine's, give or take {self.within_s:.2g} s"


async def compare_clocks(
    ask: Callable[[], Awaitable[Clocks]], now: Callable[[], Clocks] = Clocks.now
) -> ClockDifference:
    """Ask another host several times what its clocks say. It is taken to say so in the middle of each round trip, of
    which the shortest counts: it leaves the least room for another moment.

    Example: asked at 100.000 s, and answered "102.250 s" at 100.500 s, that host is 2 s ahead, give or take 0.25 s.
    """
    differences: list[ClockDifference] = []
    for _ in range(ASKED):
        before = now()
        there = await ask()
        after = now()
        half_ns = (after.steady_ns - before.steady_ns) // 2
        differences.append(
            ClockDifference(
                (there.wall_ns - before.wall_ns - half_ns) / 1e9,
                there.steady_ns - before.steady_ns - half_ns,
                half_ns / 1e9,
            )
        )
    return min(differences, key=lambda difference: difference.within_s)

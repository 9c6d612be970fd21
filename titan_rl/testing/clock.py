"""Clock in virtual time, for tests of anything that takes a `Clock`."""

from __future__ import annotations

from typing import Any

from titan_rl.core.clock import Clock


class ManualClock(Clock):
    """Clock that advances when a test adds to `seconds`, and by `tick_s` seconds with each reading."""

    def __init__(self, seconds: float = 0.0, *, tick_s: float = 0.0) -> None:
        self.seconds = seconds
        self.tick_s = tick_s

    def now(self) -> float:
        seconds = self.seconds
        self.seconds += self.tick_s
        return seconds

    def now_ns(self) -> int:
        return round(self.now() * 1e9)

    def wall(self) -> float:
        return self.now()


class StepClock(Clock):
    """Clock that advances by a second with each step of an engine that counts its steps as `num_steps`."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def now(self) -> float:
        return float(self._engine.num_steps)

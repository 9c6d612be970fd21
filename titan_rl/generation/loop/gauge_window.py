"""What an engine says of itself, step by step, summed up between two pulls."""

from __future__ import annotations

from collections.abc import Mapping

from titan_rl.generation.engine import Engine, GaugedEngine
from titan_rl.generation.types import GaugeSummary

_TOTAL = "_total"


class GaugeWindow:
    """The gauges of one engine since the window was last taken. Of one that reports none there is nothing.

    Args:
        engine: asked now, for what its totals begin from.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine if isinstance(engine, GaugedEngine) else None
        self._now = self._read()
        self._before = self._now
        self._begin()

    def note_step(self) -> None:
        """The engine has taken a step."""
        if self._engine is None:
            return
        self._num_steps += 1
        self._now = self._read()
        for name, value in self._now.items():
            if not name.endswith(_TOTAL):
                self._sums[name] = self._sums.get(name, 0.0) + value
                self._maxima[name] = max(self._maxima.get(name, value), value)

    def take(self, more: Mapping[str, float]) -> GaugeSummary:
        """The window so far; the next one begins.

        Args:
            more: counts that are not the engine's own.
        """
        totals = dict(more) | {
            name.removesuffix(_TOTAL): value - self._before.get(name, 0.0)
            for name, value in self._now.items()
            if name.endswith(_TOTAL)
        }
        summary = GaugeSummary(self._num_steps, self._sums, self._maxima, totals)
        self._before = self._now
        self._begin()
        return summary

    def _read(self) -> Mapping[str, float]:
        return {} if self._engine is None else {name: float(value) for name, value in self._engine.gauges().items()}

    def _begin(self) -> None:
        self._num_steps = 0
        self._sums: dict[str, float] = {}
        self._maxima: dict[str, float] = {}

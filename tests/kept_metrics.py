"""A metric sink that keeps its records."""

from __future__ import annotations

from collections.abc import Mapping


class KeptMetrics(list[tuple[int, dict[str, float]]]):
    """Steps and metrics in the order in which they were logged."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.append((step, dict(metrics)))

    def close(self) -> None: ...

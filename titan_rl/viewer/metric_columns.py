"""Metrics of a run as columns of numbers, their curves, and their descriptions."""

from __future__ import annotations

import math
import sys
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from typing_extensions import TypeIs

from titan_rl.metrics.table import GROUPS, find_metric

Curve = dict[str, list[float | None]]
"""{"steps": [...], "values": [...]}, and "low" and "high" if each point stands for several steps."""


class MetricColumns:
    """Ascending steps, and values, of each metric by its name. Null values are NaN."""

    def __init__(self) -> None:
        self._steps: dict[str, array[float]] = {}
        self._values: dict[str, array[float]] = {}

    def add(self, record: Mapping[str, Any]) -> None:
        """Add a line of `metrics.jsonl`. Values that are not numbers are left out."""
        step = record.get("step")
        if not _is_number(step):
            return
        for name, value in record.items():
            if name == "step" or not (value is None or _is_number(value)):
                continue
            if name not in self._steps:
                self._steps[name], self._values[name] = array("d"), array("d")
            steps, values = self._steps[name], self._values[name]
            index = len(steps) if not steps or steps[-1] <= step else bisect_right(steps, step)
            steps.insert(index, step)
            values.insert(index, math.nan if value is None else value)

    def __contains__(self, name: str) -> bool:
        return name in self._steps

    def __iter__(self) -> Iterator[str]:
        return iter(self._steps)

    def values(self, name: str) -> list[float]:
        """Finite values, ordered by step."""
        return [value for value in self._values.get(name, ()) if math.isfinite(value)]

    def points(self, name: str) -> list[tuple[float, float]]:
        """Pairs of step and value. A null value is NaN."""
        return list(zip(self._steps.get(name, ()), self._values.get(name, ()), strict=True))

    def count(self, name: str) -> int:
        """Number of steps that have the metric."""
        return len(self._steps.get(name, ()))

    def curve(self, name: str, *, points: int, first: float = -math.inf, last: float = math.inf) -> Curve:
        """Return the values from step `first` to step `last`.

        Args:
            points: Maximum number of points. If there are more steps, each point is the mean of equally many steps, and
                has the lowest and the highest of their values.

        Example: three steps with the values 1, 3 and 8 give, with `points=2`,

            {"steps": [2.0, 3.0], "values": [2.0, 8.0], "low": [1.0, 8.0], "high": [3.0, 8.0]}
        """
        steps, values = self._steps.get(name, array("d")), self._values.get(name, array("d"))
        begin, end = bisect_left(steps, first), bisect_right(steps, last)
        if end - begin <= points:
            return {"steps": list(steps[begin:end]), "values": [_finite(value) for value in values[begin:end]]}
        curve: Curve = {"steps": [], "values": [], "low": [], "high": []}
        each = math.ceil((end - begin) / points)
        for start in range(begin, end, each):
            several = values[start : min(start + each, end)]
            known = [value for value in several if math.isfinite(value)]
            curve["steps"].append(steps[start + len(several) - 1])
            curve["values"].append(math.fsum(known) / len(known) if known else None)
            curve["low"].append(min(known, default=None))
            curve["high"].append(max(known, default=None))
        return curve


def _is_number(value: object) -> TypeIs[float]:
    is_float = isinstance(value, float)
    return is_float or (isinstance(value, int) and not isinstance(value, bool) and abs(value) <= sys.float_info.max)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


OTHERS = "Others"
_ORDER = [*GROUPS, OTHERS]


def described(names: Iterable[str]) -> list[dict[str, Any]]:
    """Make the answer to /api/runs/{id}/metrics, in the order of the groups. Metrics that the table lacks are last.

    Example: `described(["train/loss"])` begins `[{"name": "train/loss", "unit": "", "help": "...",`.
    """
    metrics = [_described(name) for name in names if name != "time_s"]
    return sorted(metrics, key=lambda metric: (_ORDER.index(metric["group"]), metric["name"]))


def _described(name: str) -> dict[str, Any]:
    metric = find_metric(name)
    texts = {field: getattr(metric, field, "") for field in ("unit", "help", "normal", "otherwise")}
    return {"name": name, **texts, "group": OTHERS if metric is None else metric.group}

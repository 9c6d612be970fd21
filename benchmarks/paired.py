"""Paired comparisons: variants take turns in both directions, so that a drift of the machine's speed cancels."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure measured several times."""

    values: Sequence[float]

    @property
    def median(self) -> float:
        return median(self.values)

    @property
    def quartiles(self) -> tuple[float, float]:
        if len(self.values) < 2:
            return self.values[0], self.values[0]
        first, _, third = quantiles(self.values, n=4, method="inclusive")
        return first, third


async def forth_and_back(rounds: int, ways: Mapping[str, Callable[[], Awaitable[float]]]) -> list[dict[str, float]]:
    """Results of each variant, as the mean over both directions of a round (A B C C B A), after one warm-up round."""
    for way in ways.values():
        await way()
    measured: list[dict[str, float]] = []
    for _ in range(rounds):
        there = {name: await way() for name, way in ways.items()}
        back = {name: await ways[name]() for name in reversed(list(ways))}
        measured.append({name: (there[name] + back[name]) / 2 for name in ways})
    return measured


def ratio(measured: Sequence[Mapping[str, float]], first: str, second: str) -> Spread:
    """Ratio of two variants in each round."""
    return Spread([values[first] / values[second] for values in measured])


def report(
    name: str,
    figure: Spread | float,
    unit: str,
    target: float | None = None,
    before: tuple[float, str] | None = None,
) -> None:
    """Print one JSON line: `name`, `value` (the median), `quartiles`, `rounds`, `unit`, and `target` if there is one.

    Args:
        before: figure of a simpler method, measured in the same run, and its description: `before` and `before_is`.
    """
    line: dict[str, Any] = {"name": name}
    if isinstance(figure, Spread):
        line["value"] = round(figure.median, 4)
        line["quartiles"] = [round(value, 4) for value in figure.quartiles]
        line["rounds"] = len(figure.values)
    else:
        line["value"] = round(figure, 4)
    line["unit"] = unit
    if target is not None:
        line["target"] = target
    if before is not None:
        line["before"], line["before_is"] = round(before[0], 4), before[1]
    print(json.dumps(line), flush=True)


def report_computed(name: str, value: float, unit: str, of: str) -> None:
    """Print one JSON line for a computed figure: `name`, `value`, `unit`, and `computed`, which says from what."""
    print(json.dumps({"name": name, "value": round(value, 4), "unit": unit, "computed": of}), flush=True)

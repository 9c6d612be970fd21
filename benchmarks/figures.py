"""Figures of `RESULTS.md`: the rows of its table, with their values, quartiles, benchmarks and commits."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

RESULTS = Path("benchmarks", "RESULTS.md")
SAME = "same"
_MODULE = re.compile(r"python (?:-m )?benchmarks[./](\w+)")
_COMMIT = re.compile(r"\b[0-9a-f]{7,40}\b")
_NAME = re.compile(r"`(\w+)`")
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True)
class Figure:
    """Row of the table of figures.

    Attributes:
        names: Figures of the row; `a_8`, `_64` are `a_8` and `a_64`.
        values: Their values, in the same order; empty if the row has values in words.
        quartiles: First and third quartile, if the row has them.
        is_better_below: Whether the target bounds the figure from above; None without a target.
        module: Benchmark that measures it; None if its command runs none.
        commits: Commits on which it was measured; the first one counts for a single figure.
    """

    names: tuple[str, ...]
    values: tuple[float, ...]
    quartiles: tuple[float, float] | None
    is_better_below: bool | None
    module: str | None
    commits: tuple[str, ...]


def figures(text: str) -> Iterator[Figure]:
    """Figures of the table in RESULTS.md, in their order. A command of `same` is that of the row before."""
    before: str | None = None
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not line.startswith("|") or len(cells) != 7 or not (names := _names(cells[0])):
            continue
        found = _MODULE.search(cells[4])
        before = found[1] if found else before if cells[4].startswith(SAME) else None
        quartiles = _numbers(cells[2].replace("–", " "))
        yield Figure(
            names,
            _numbers(cells[1]),
            (quartiles[0], quartiles[1]) if len(quartiles) == 2 else None,
            "≤" in cells[3] if "≤" in cells[3] or "≥" in cells[3] else None,
            before,
            tuple(_COMMIT.findall(cells[6])),
        )


def _names(cell: str) -> tuple[str, ...]:
    found: list[str] = []
    for name in _NAME.findall(cell.partition("(")[0]):
        if name.startswith("_") and found:
            parts = name.count("_")
            name = "_".join(found[0].split("_")[:-parts]) + name
        found.append(name)
    return tuple(found)


def _numbers(cell: str) -> tuple[float, ...]:
    return tuple(float(number.replace(",", "")) for number in _NUMBER.findall(cell))

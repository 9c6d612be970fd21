"""Figures of `RESULTS.md`: reads the rows of its tables, and updates them after a measurement.

Each section of the page has its own table. The section "Missed targets" lists the rows whose targets are in bold;
that list is generated.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

RESULTS = Path("benchmarks", "RESULTS.md")
SAME = "same"
_MODULE = re.compile(r"python (?:-m )?benchmarks[./](\w+)")
_COMMIT = re.compile(r"\b[0-9a-f]{7,40}\b")
_NAME = re.compile(r"`([\w.]+)`")
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_MISSED = "\n## Missed targets\n"
_MISSED_HEAD = "| section | figure | value | target |\n|---|---|---|---|\n"


@dataclass(frozen=True)
class Figure:
    """Row of a table of figures.

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
    """Figures of the tables in RESULTS.md, in their order. A command of `same` is that of the row before it in its
    table."""
    before: str | None = None
    for line in text.splitlines():
        if not line.startswith("|"):
            before = None
        if (row := _row(line)) is None:
            continue
        names, cells = row
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


@dataclass(frozen=True, slots=True)
class Measured:
    """Figure of a benchmark that has just run.

    Attributes:
        command: Arguments of `python -m benchmarks.`.
    """

    value: float
    quartiles: tuple[float, float] | None
    command: str


def with_measured(text: str, measured: Mapping[str, Measured], *, date: str, commit: str) -> str:
    """RESULTS.md with new values, quartiles, commands, dates and commits in the rows whose figures have all been
    measured, with the targets in bold that they miss, and with the list of missed targets. Qualifiers in brackets and
    notes stay."""
    lines: list[str] = []
    before = replaced = ""
    for line in text.splitlines():
        if not line.startswith("|"):
            before = replaced = ""
        if (row := _row(line)) is None:
            lines.append(line)
            continue
        names, cells = row
        command = before if cells[4] == SAME else cells[4]
        if cells[4] == SAME and replaced:
            cells[4] = before
        before, replaced = command, ""
        if all(name in measured for name in names):
            found = [measured[name] for name in names]
            values = [each.value for each in found]
            quartiles = found[0].quartiles if len(found) == 1 else None
            replaced = f"`python -m benchmarks.{found[0].command}`"
            cells[1] = ", ".join(map(_formatted, values))
            cells[2] = "" if quartiles is None else "–".join(map(_formatted, quartiles))
            cells[3] = _marked(cells[3], values)
            cells[4:] = [replaced, date, commit]
        lines.append("|".join(["", *(f" {cell} " if cell else " " for cell in cells), ""]))
    return with_missed("\n".join(lines) + "\n")


def with_missed(text: str) -> str:
    """RESULTS.md with a generated list of the rows whose targets are in bold; unchanged without a section for it."""
    before, found, after = text.partition(_MISSED + "\n")
    section, end, after = after.partition("\n## ")
    if not found:
        return text
    return "".join([before, found, section.partition(_MISSED_HEAD)[0], _MISSED_HEAD, *_missed(end + after), end, after])


def _missed(text: str) -> Iterator[str]:
    title = ""
    for line in text.splitlines():
        if line.startswith("## "):
            title = line.removeprefix("## ")
        cells = _cells(line)
        if len(cells) == 7 and "**" in cells[3]:
            anchor = re.sub(r"[^\w-]", "", title.lower().replace(" ", "-"))
            yield f"| [{title}](#{anchor}) | {cells[0].partition('(')[0].strip()} | {cells[1]} | {cells[3]} |\n"


def _formatted(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _marked(target: str, values: list[float]) -> str:
    """The target in bold if one of the values misses it. Of several targets, each belongs to one value."""
    plain = target.replace("**", "")
    targets = plain.split(", ")
    if len(targets) == len(values) > 1:
        return ", ".join(_marked(each, [value]) for each, value in zip(targets, values, strict=True))
    limits = _numbers(plain)
    if not limits or plain[0] not in "≤≥":
        return target
    missed = max(values) > limits[0] if plain[0] == "≤" else min(values) < limits[0]
    return f"**{plain}**" if missed else plain


def _row(line: str) -> tuple[tuple[str, ...], list[str]] | None:
    """Names and cells of a row of a table of figures; None for another line."""
    cells = _cells(line)
    if len(cells) != 7 or not (names := _names(cells[0])):
        return None
    return names, cells


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")] if line.startswith("|") else []


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

"""Table of all metrics, read from `metrics.toml`, and lookup of a name from `metrics.jsonl` in this table."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files

from titan_rl.metrics.metric import Metric

_TABLE = tomllib.loads(files("titan_rl.metrics").joinpath("metrics.toml").read_text("utf-8"))

GROUPS = tuple(_TABLE)
"""Groups of metrics, in the order in which they are shown."""

METRICS = tuple(Metric(name, group=group, **entry) for group in GROUPS for name, entry in _TABLE[group].items())
"""All metrics, sorted by group."""


@dataclass(frozen=True, slots=True)
class Match:
    """Entry of the table that matches a name in `metrics.jsonl`, with the values of the variable parts of the name.

    Args:
        metric: Entry of the table. For a metric of held-out rollouts, it is derived from the training metric.
        labels: Values of the parts in angle brackets, by the names of these parts.

    Example: `task/sums/share` matches the entry `task/<task>/share`, with the labels {"task": "sums"}.
    """

    metric: Metric
    labels: Mapping[str, str]


def find_metric(name: str) -> Metric | None:
    """Find the entry for a name in `metrics.jsonl`; None if there is none.

    Example: `find_metric("validation/turns_mean").help` is
        "Mean number of turns per rollout. Measured on held-out samples."
    """
    match = match_metric(name)
    return None if match is None else match.metric


def match_metric(name: str) -> Match | None:
    """Find the most specific entry for a name in `metrics.jsonl`, with the values of the name's variable parts; None if
    there is none."""
    match = _entry(name)
    if name.startswith("validation/") and (match is None or match.metric.is_open):
        return _held_out(name) or match
    return match


def _held_out(name: str) -> Match | None:
    """Derive the entry for a metric of held-out rollouts from that of training rollouts; None if there is none."""
    rest = name.removeprefix("validation/")
    suite, _, in_suite = rest.partition("/")
    for inner, prefix, labels in ((rest, "validation", {}), (in_suite, "validation/<suite>", {"suite": suite})):
        full = inner if inner.startswith("completion/") else f"rollout/{inner}"
        if (match := _entry(full)) is not None:
            metric = match.metric
            derived = replace(
                metric,
                name=f"{prefix}/{metric.name.removeprefix('rollout/')}",
                help=f"{metric.help} Measured on held-out samples.",
                group="Validation",
            )
            return Match(derived, {**labels, **match.labels})
    return None


def _entry(name: str) -> Match | None:
    found = [Match(metric, match.groupdict()) for metric in METRICS if (match := _pattern(metric.name).fullmatch(name))]
    return min(found, key=lambda match: (match.metric.is_open, len(match.labels)), default=None)


@cache
def _pattern(name: str) -> re.Pattern[str]:
    def part_pattern(part: re.Match[str]) -> str:
        return f"(?P<{part[1]}>{_PATTERNS.get(part[1], '.+')})"

    return re.compile(re.sub(r"<(\w+)>", part_pattern, re.escape(name)))


_CHECKED = ("task", "adapter", "suite", "seat", "measure", "host")
_PATTERNS = {"age": r"-?\d+", **dict.fromkeys(_CHECKED, "[^/]+")}
"""Patterns of variable parts. Names that the library checks have no slash; other names of the user may have one."""

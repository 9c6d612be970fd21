"""Bottleneck of a run: the activity that takes most of the time of its steps, and advice on how to shorten it.

It is computed from `metrics.jsonl` alone. Training, weight sync, validation and checkpoints are stages of the training
loop, whose times are measured. The wait for a batch is attributed to generation for as long as the engines were busy.
The rest of the wait is divided between environments, rewards and a teacher in proportion to the time that rollouts
spent in each.
"""

from __future__ import annotations

import tomllib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

_ACTIVITIES: Mapping[str, Any] = tomllib.loads(files("titan_rl.metrics").joinpath("bottleneck.toml").read_text("utf-8"))

ADVICE: Mapping[str, str] = {name: activity["advice"] for name, activity in _ACTIVITIES.items()}
"""Advice by bottleneck."""

_STAGES = {stage: name for name, activity in _ACTIVITIES.items() for stage in activity.get("stages", ())}
_OUTSIDE = {activity["outside"]: name for name, activity in _ACTIVITIES.items() if "outside" in activity}
"""Activities of rollouts outside the engines."""


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """Activity that takes most of the time of a run's steps.

    Args:
        name: Name of the activity: a key of `ADVICE`.
        share: Share of the activity in the steps' time, in [0, 1].
        sentence: Message for the user, with the advice.
    """

    name: str
    share: float
    sentence: str


def bottleneck(records: Iterable[Mapping[str, Any]]) -> Bottleneck | None:
    """Find the bottleneck of one step, or of several steps together.

    Args:
        records: Records of `metrics.jsonl`. Records that belong to no step are ignored.

    Returns:
        The bottleneck; None if no record has the times of a step's stages.

    Example:

        found = bottleneck(read_jsonl(run_dir.metrics))
        found.sentence  # "generation takes 71% of a step; it may help to have more generators, ..."
    """
    parts: defaultdict[str, float] = defaultdict(float)
    for record in records:
        for name, seconds in parts_of(record).items():
            parts[name] += seconds
    return bottleneck_of(parts)


def bottleneck_of(parts: Mapping[str, float]) -> Bottleneck | None:
    """Find the bottleneck from sums of the results of `parts_of`; None if no activity took any time."""
    total = sum(parts.values())
    if not total:
        return None
    name = max(parts, key=lambda name: parts[name])
    share = parts[name] / total
    return Bottleneck(name, share, f"{name} takes {share:.0%} of a step; it may help to have {ADVICE[name]}")


def parts_of(record: Mapping[str, Any]) -> dict[str, float]:
    """Compute the seconds of one step by activity; empty if the record has no times of stages."""
    if "time/train_s" not in record:
        return {}
    parts: defaultdict[str, float] = defaultdict(float)
    for metric, name in _STAGES.items():
        parts[name] += _number(record, metric)
    wait = _number(record, "time/wait_for_rollouts_s")
    window = sum(parts.values()) + wait
    busy_s = window * (1.0 - _number(record, "engine/idle_share"))
    spent = {name: _number(record, metric) for metric, name in _OUTSIDE.items()}
    elsewhere = max(0.0, wait - busy_s) if sum(spent.values()) else 0.0
    parts["generation"] = wait - elsewhere
    if elsewhere:
        parts |= {name: elsewhere * seconds / sum(spent.values()) for name, seconds in spent.items()}
    return dict(parts)


def _number(record: Mapping[str, Any], name: str) -> float:
    value = record.get(name)
    return float(value) if isinstance(value, int | float) else 0.0

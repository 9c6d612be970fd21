"""The table of all metrics, and what an entry of it says of a name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

from titan_rl.metrics.metric import Metric, MetricGroup
from titan_rl.metrics.of_engines import ENGINE_METRICS
from titan_rl.metrics.of_rollouts import ROLLOUT_METRICS
from titan_rl.metrics.of_running import (
    HOST_METRICS,
    SCHEDULING_METRICS,
    SERVER_METRICS,
    SPEED_METRICS,
    SYNC_METRICS,
)
from titan_rl.metrics.of_training import TRAINING_METRICS

VALIDATION, TASKS = MetricGroup.VALIDATION, MetricGroup.TASKS

VALIDATION_METRICS = (
    Metric(
        "validation/reward_mean",
        "reward",
        "Mean reward on held-out samples, of all suites together.",
        VALIDATION,
        "It rises with rollout/finished_reward_mean.",
        "Falling while that rises: the policy learns the training samples by heart; more or other samples.",
    ),
    Metric(
        "validation/<suite>/reward_mean",
        "reward",
        "The same, of one suite where there are several.",
        VALIDATION,
    ),
    Metric(
        "validation/loss",
        "",
        "In titan-rl sft: the loss of demonstrations that are held out.",
        VALIDATION,
        "It falls.",
        "Rising while train/loss falls: fewer epochs, or more demonstrations.",
    ),
    Metric(
        "validation/unscored",
        "rollouts",
        "Held-out rollouts that have no reward, or ended in a fault that is not the policy's.",
        VALIDATION,
        "0.",
        "rollouts.jsonl has them, with phase validation.",
    ),
    Metric("validation/<suite>/unscored", "rollouts", "The same, of one suite.", VALIDATION),
    Metric("validation/<measure>", "", "What the task's `measure` says of its held-out groups.", VALIDATION),
    Metric("validation/<suite>/<measure>", "", "The same, of one suite.", VALIDATION),
)
"""Beside these, `validation/<name>` and `validation/<suite>/<name>` for each `rollout/<name>` and `completion/...`."""

TASK_METRICS = (
    Metric("task/<task>/num_groups", "groups", "Groups of one task that the step was trained on.", TASKS),
    Metric(
        "task/<task>/share",
        "share",
        "Their share of the step's groups.",
        TASKS,
        "The task's weight over that of all.",
        "Less: its groups are dropped (task/<task>/dropped/<reason>), or are overtaken by others (scheduling.window).",
    ),
    *(
        replace(
            metric,
            name=f"task/<task>/{metric.name.removeprefix('rollout/')}",
            help=f"As {metric.name}, of one task.",
            normal="",
            otherwise="",
            group=TASKS,
        )
        for metric in ROLLOUT_METRICS
        if metric.name
        in {
            "rollout/reward_mean",
            "rollout/reward_std",
            "rollout/zero_variance_groups",
            "rollout/completion_tokens_mean",
            "rollout/completion_tokens_max",
            "rollout/turns_mean",
            "rollout/finished_groups",
            "rollout/finished_reward_mean",
            "rollout/finished_errors",
        }
    ),
    Metric("task/<task>/dropped/<reason>", "groups", "Groups of one task that were not trained on.", TASKS),
)

METRICS: tuple[Metric, ...] = (
    *ROLLOUT_METRICS,
    *VALIDATION_METRICS,
    *TRAINING_METRICS,
    *SPEED_METRICS,
    *SCHEDULING_METRICS,
    *SYNC_METRICS,
    *ENGINE_METRICS,
    *HOST_METRICS,
    *TASK_METRICS,
    *SERVER_METRICS,
)
"""By their groups, in the order of `MetricGroup`."""


@dataclass(frozen=True, slots=True)
class Match:
    """What a name in `metrics.jsonl` is.

    Args:
        metric: its entry. Of held-out rollouts it is made of that of the others.
        places: what stands in the places of the entry's angle brackets.

    Example: `task/sums/share` is of the entry `task/<task>/share`, with the places {"task": "sums"}.
    """

    metric: Metric
    places: Mapping[str, str]


def find_metric(name: str) -> Metric | None:
    """The entry of a name in `metrics.jsonl`.

    Example: `find_metric("validation/turns_mean").help` is "Turns of a rollout. Of held-out samples."
    """
    match = match_metric(name)
    return None if match is None else match.metric


def match_metric(name: str) -> Match | None:
    """The entry of a name in `metrics.jsonl`, the most exact one, and what stands in its places."""
    match = _entry(name)
    if name.startswith("validation/") and (match is None or match.metric.is_open):
        return _of_held_out(name) or match
    return match


def _of_held_out(name: str) -> Match | None:
    """What is said of rollouts in training is said of held-out ones, too."""
    rest = name.removeprefix("validation/")
    suite, _, of_suite = rest.partition("/")
    for inner, prefix, places in ((rest, "validation", {}), (of_suite, "validation/<suite>", {"suite": suite})):
        full = inner if inner.startswith("completion/") else f"rollout/{inner}"
        if (match := _entry(full)) is not None:
            metric = match.metric
            told = replace(
                metric,
                name=f"{prefix}/{metric.name.removeprefix('rollout/')}",
                help=f"{metric.help} Of held-out samples.",
                group=VALIDATION,
            )
            return Match(told, {**places, **match.places})
    return None


def _entry(name: str) -> Match | None:
    found = [Match(metric, match.groupdict()) for metric in METRICS if (match := _pattern(metric.name).fullmatch(name))]
    return min(found, key=lambda match: (match.metric.is_open, len(match.places)), default=None)


@cache
def _pattern(name: str) -> re.Pattern[str]:
    return re.compile("".join(_place(part) for part in re.split(r"(<\w+>)", name)))


def _place(part: str) -> str:
    """Names of a run have no slash; what users name may have."""
    if not part.startswith("<"):
        return re.escape(part)
    name = part.strip("<>")
    return f"(?P<{name}>{_PLACES.get(name, '.+')})"


_PLACES = {"task": "[^/]+", "suite": "[^/]+", "seat": "[^/]+", "measure": "[^/]+", "age": r"-?\d+", "host": "[^/]+"}

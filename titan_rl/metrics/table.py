"""Table of all metrics, and lookup of a name from `metrics.jsonl` in this table."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

from titan_rl.metrics.metric import Metric, MetricGroup
from titan_rl.metrics.rollouts import ROLLOUT_METRICS
from titan_rl.metrics.system import (
    ENGINE_METRICS,
    HOST_METRICS,
    SCHEDULING_METRICS,
    SERVER_METRICS,
    SPEED_METRICS,
    SYNC_METRICS,
)
from titan_rl.metrics.training import TRAINING_METRICS

VALIDATION, TASKS = MetricGroup.VALIDATION, MetricGroup.TASKS

VALIDATION_METRICS = (
    VALIDATION.metric(
        "validation/reward_mean",
        "reward",
        "Mean reward on held-out samples, over all suites.",
        "Rises with rollout/finished_reward_mean.",
        "If it falls while rollout/finished_reward_mean rises, the policy overfits to the training samples: use "
        "more, or more varied, samples.",
    ),
    VALIDATION.metric(
        "validation/<suite>/reward_mean",
        "reward",
        "Mean reward on held-out samples of one suite, if there are several.",
    ),
    VALIDATION.metric(
        "validation/loss",
        "",
        "Loss on held-out demonstrations (titan-rl sft only).",
        "Falls.",
        "If it rises while train/loss falls, train for fewer epochs or add demonstrations.",
    ),
    VALIDATION.metric(
        "validation/unscored",
        "rollouts",
        "Held-out rollouts that have no reward, or that failed through no fault of the policy.",
        "0.",
        "Look them up in rollouts.jsonl, where they have phase = validation.",
    ),
    VALIDATION.metric("validation/<suite>/unscored", "rollouts", "validation/unscored of one suite."),
    VALIDATION.metric(
        "validation/<measure>", "", "Value that the task's `measure` method returns for its held-out groups."
    ),
    VALIDATION.metric(
        "validation/<suite>/<measure>",
        "",
        "Value that the task's `measure` method returns for the groups of one suite.",
    ),
)
"""Metrics of validation. There are also `validation/<name>` and `validation/<suite>/<name>` for each `rollout/<name>`
and `completion/...`."""

TASK_METRICS = (
    TASKS.metric("task/<task>/num_groups", "groups", "Groups of one task in the training batch."),
    TASKS.metric(
        "task/<task>/share",
        "share",
        "Share of the training batch's groups that belong to one task.",
        "The task's weight divided by the sum of all weights.",
        "If it is lower, groups of the task are dropped (task/<task>/dropped/<reason>), or groups of other tasks "
        "overtake them (scheduling.window).",
    ),
    *(
        TASKS.metric(f"task/<task>/{metric.name.removeprefix('rollout/')}", metric.unit, f"{metric.name} of one task.")
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
    TASKS.metric("task/<task>/dropped/<reason>", "groups", "Groups of one task that were dropped, by reason."),
)

ADAPTER_METRICS = (
    TASKS.metric(
        "adapter/<adapter>/step",
        "steps",
        "In a run that trains several LoRA adapters, of which each also has a metrics.jsonl of its own: number of "
        "steps for which this adapter has been trained.",
    ),
    TASKS.metric(
        "adapter/<adapter>/trainer_share",
        "share",
        "In a run that trains several LoRA adapters: share of the trainer's time so far that was spent on this one.",
        "1 divided by the number of adapters, within 10%, while all of them have batches ready.",
        "If it is lower, the adapter waits for its rollouts.",
    ),
    TASKS.metric(
        "adapter/<adapter>/failed", "", "1 if the training of this LoRA adapter has failed, otherwise 0.", "0."
    ),
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
    *ADAPTER_METRICS,
    *SERVER_METRICS,
)
"""All metrics, sorted by group in the order of `MetricGroup`."""


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
                group=VALIDATION,
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


_PATTERNS = {
    "task": "[^/]+",
    "adapter": "[^/]+",
    "suite": "[^/]+",
    "seat": "[^/]+",
    "measure": "[^/]+",
    "age": r"-?\d+",
    "host": "[^/]+",
}
"""Patterns of variable parts. Names that the library checks have no slash; other names of the user may have one."""

"""What is said of the metrics that a run has."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from titan_rl.metrics.metric import MetricGroup
from titan_rl.metrics.table import find_metric

OTHERS = "Others"
_ORDER = {group.value: place for place, group in enumerate(MetricGroup)}


def described(names: Iterable[str]) -> list[dict[str, Any]]:
    """The answer to /api/runs/{id}/metrics: by groups in their order, those that the table does not have last.

    Example: `described(["train/loss"])` begins `[{"name": "train/loss", "unit": "", "help": "...",`.
    """
    metrics = [_described(name) for name in names if name != "time_s"]
    return sorted(metrics, key=lambda metric: (_ORDER.get(metric["group"], len(_ORDER)), metric["name"]))


def _described(name: str) -> dict[str, Any]:
    metric = find_metric(name)
    if metric is None:
        return {"name": name, "unit": "", "help": "", "normal": "", "otherwise": "", "group": OTHERS}
    return {
        "name": name,
        "unit": metric.unit,
        "help": metric.help,
        "normal": metric.normal,
        "otherwise": metric.otherwise,
        "group": metric.group.value,
    }

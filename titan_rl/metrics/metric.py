"""Description of one metric, and the groups in which metrics are shown."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class MetricGroup(StrEnum):
    """Groups of metrics, in the order in which they are shown."""

    REWARD = "Reward"
    ENDS = "Outcomes and lengths"
    VALIDATION = "Validation"
    OPTIMIZATION = "Optimization"
    OFF_POLICY = "Off-policy"
    SPEED = "Speed"
    SCHEDULING = "Scheduling"
    SYNC = "Weight sync"
    ENGINES = "Engines"
    HOSTS = "Hosts"
    TASKS = "Tasks"
    SERVER = "Server"


@dataclass(frozen=True, slots=True)
class Metric:
    """One entry of the table of metrics.

    Args:
        name: Name in `metrics.jsonl`. A part in angle brackets is variable, such as a task's name: "task/<task>/share".
        help: Meaning of the metric, in one sentence.
        unit: Unit of the values; "" if they have none.
        normal: Values in a healthy run, if they can be stated.
        otherwise: Advice for other values.
    """

    name: str
    help: str
    group: MetricGroup
    unit: str = ""
    normal: str = ""
    otherwise: str = ""

    @property
    def is_open(self) -> bool:
        """Whether a user's task, reward or engine chooses the last part of the name."""
        return self.name.endswith(("<reward>", "<metric>", "<counter>", "<gauge>_mean", "<gauge>_max", "<measure>"))

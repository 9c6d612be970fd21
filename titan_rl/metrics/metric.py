"""Description of one metric, and the groups that metrics are shown in."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class MetricGroup(StrEnum):
    """Groups of metrics, in the order in which they are shown."""

    REWARD = "Reward"
    ENDS = "Ends and lengths"
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
        unit: "" for a number without a unit.
        help: One sentence.
        normal: Values of a healthy run, where they can be stated.
        otherwise: Advice for other values.
    """

    name: str
    unit: str
    help: str
    group: MetricGroup
    normal: str = ""
    otherwise: str = ""

    @property
    def is_open(self) -> bool:
        """Whether the name is chosen by a task, a reward or an engine of the user."""
        return self.name.endswith(("<reward>", "<metric>", "<gauge>", "<gauge>_mean", "<gauge>_max", "<measure>"))

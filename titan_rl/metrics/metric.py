"""What is said of a metric."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class MetricGroup(StrEnum):
    """What a metric is shown among, in this order."""

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
    """One entry of the table.

    Args:
        name: as in `metrics.jsonl`. A part in angle brackets stands for a name of the run's: "task/<task>/share".
        unit: "" for a number without one.
        help: a sentence.
        normal: what it is where all is well, where that can be said.
        otherwise: what to do where it is not.
    """

    name: str
    unit: str
    help: str
    group: MetricGroup
    normal: str = ""
    otherwise: str = ""

    @property
    def is_open(self) -> bool:
        """It stands for whatever names a task, a reward or an engine of the user's gives."""
        return self.name.endswith(("<reward>", "<metric>", "<gauge>", "<gauge>_mean", "<gauge>_max", "<measure>"))

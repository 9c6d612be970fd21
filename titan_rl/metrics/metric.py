"""Description of one metric."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Metric:
    """One entry of the table of metrics.

    Args:
        name: Name in `metrics.jsonl`. A part in angle brackets is variable, such as a task's name: "task/<task>/share".
        help: Meaning of the metric, in one sentence.
        group: Group in which the metric is shown: its table in `metrics.toml`.
        unit: Unit of the values; "" if they have none.
        normal: Values in a healthy run, if they can be stated.
        otherwise: Advice for other values.
    """

    name: str
    help: str
    group: str
    unit: str = ""
    normal: str = ""
    otherwise: str = ""

    @property
    def is_open(self) -> bool:
        """Whether a user's task, reward or engine chooses the last part of the name."""
        return self.name.endswith(("<reward>", "<metric>", "<counter>", "<gauge>_mean", "<gauge>_max", "<measure>"))

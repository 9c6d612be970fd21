"""Signs in the metrics of a run by which it may not learn, read from `signs.toml`."""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass
from importlib.resources import files

from titan_rl.scheduling.filters import EQUAL_REWARDS_ADVICE


@dataclass(frozen=True, slots=True)
class Sign:
    """Sign in one metric. The texts of a verdict and of a warning are empty if there is none.

    Args:
        warn, bad: Means over the last steps from which on the verdict is a warning, or bad.
        title: Title of the verdict, with a placeholder for the mean.
        rollouts: Status of the rollouts that show it, or "*" for all; empty if the curve does.
        of_learning: Whether it is no fault in a run with nothing left to learn.
        of_rounding: Whether low precision alone raises the metric.
        least: Value of one step from which on the step counts for the warning.
    """

    metric: str
    warn: float = math.inf
    bad: float = math.inf
    title: str = ""
    advice: str = ""
    rollouts: str = ""
    of_learning: bool = False
    of_rounding: bool = False
    least: float = math.inf
    warning: str = ""


def _read_signs() -> tuple[Sign, ...]:
    text = files("titan_rl.viewer").joinpath("signs.toml").read_text("utf-8")
    return tuple(Sign(**row) for row in tomllib.loads(text.replace("EQUAL_REWARDS", EQUAL_REWARDS_ADVICE))["signs"])


SIGNS = _read_signs()

"""Changes of a metric during a run, each with its standard error: from the first steps to the last, along a slow trend,
and from the best steps to the last.

A change counts if it is beyond the noise, and large enough to matter:

    significant   more than 2.5 standard errors. The best value of a series is partly luck, so that a fall from it needs
                  3 in validations, and 4 in training, which has more steps to choose from: of 100 runs of 300 steps
                  whose reward does not change, 10 are warned of a fall, and 1 has it at its end
    large enough  at least 5% of the spread of rewards between rollouts; a fall, 10%

The second condition keeps a change of 0.005 ± 0.002 from counting in a run whose rewards are 0 or 1.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, linear_regression

from titan_rl.viewer.metric_columns import MetricColumns

RECENT = 10
"""Number of steps over which current figures are averaged."""

HELD_OUT = "validation/reward_mean"

SURE = 2.5  # standard errors
SURE_OF_HELD_OUT_FALL = 3.0
SURE_OF_FALL = 4.0
LEAST = 0.05  # of the spread of rewards
SMALL = 0.2  # of the spread of rewards: a smaller rise is slow
NEAR = 0.03  # of the range of rewards
FEWEST = 3  # steps on each side of a comparison
WINDOW = 5  # steps that are averaged in the search for the best ones


@dataclass(frozen=True, slots=True)
class Change:
    """Change of a metric between two steps.

    Args:
        error: Standard error of the difference; None if unknown.
        least: Smallest change that counts.
        sure: Number of standard errors that a change must exceed to count.
    """

    metric: str
    before: float
    after: float
    first_step: float
    last_step: float
    error: float | None
    least: float = 0.0
    sure: float = SURE

    @property
    def gain(self) -> float:
        return self.after - self.before

    @property
    def direction(self) -> int:
        """Direction of the change: 1 up, -1 down, 0 if it does not count. Without a known error the noise is 0."""
        counts = abs(self.gain) > self.noise and abs(self.gain) >= self.least
        return 0 if not counts else 1 if self.gain > 0 else -1

    @property
    def noise(self) -> float:
        return self.sure * (self.error or 0.0)

    @property
    def is_small(self) -> bool:
        """Whether the change is small, compared with the spread of rewards."""
        return abs(self.gain) < self.least * SMALL / LEAST

    @property
    def is_noisy(self) -> bool:
        """Whether even a change that is not small would be within the noise."""
        return self.noise > self.least * SMALL / LEAST


def held_out_change(columns: MetricColumns, metric: str) -> Change | None:
    """Change from the first validation to the last; None if there were not two.

    The error is computed as for two independent means over prompts. It is larger than the error for the same prompts
    measured twice.
    """
    points = finite_points(columns, metric)
    if len(points) < 2:
        return None
    (first, before), (last, after) = points[0], points[-1]
    errors = _held_out_errors(columns, metric)
    error = math.hypot(errors[first], errors[last]) if {first, last} <= errors.keys() else None
    return Change(metric, before, after, first, last, error, least_change(columns, metric))


def earned_change(columns: MetricColumns, metric: str) -> Change | None:
    """Change from the mean of the first steps to the mean of the last, at most `RECENT` each. If it does not count, but
    a linear trend over all steps does, the change along the trend. None with fewer than twice `FEWEST` steps."""
    points = finite_points(columns, metric)
    count = min(RECENT, len(points) // 2)
    if count < FEWEST:
        return None
    steps, values = [step for step, _ in points], [value for _, value in points]
    noise, least = step_noise(values), least_change(columns, metric)
    before, after, error = fmean(values[:count]), fmean(values[-count:]), noise * math.sqrt(2 / count)
    change = Change(metric, before, after, steps[0], steps[-1], error, least)
    if change.direction or len(values) < 4 * RECENT:
        return change
    line = linear_regression(range(len(values)), values)
    begin, end = line.intercept, line.intercept + line.slope * (len(values) - 1)
    error = noise * math.sqrt(12 / len(values))
    trend = Change(metric, begin, end, steps[0], steps[-1], error, least)
    return trend if trend.direction else change


def fall(columns: MetricColumns, metric: str) -> Change | None:
    """Fall of a reward from its best steps to the last ones; None if none counts."""
    peak = Peak(metric)
    peak.look(columns)
    return peak.fall


def least_change(columns: MetricColumns, metric: str) -> float:
    """Smallest change of a reward that counts: a share of its largest spread between rollouts, or of its largest value
    if the spread is not known. Any change of a loss counts."""
    prefix, _, name = metric.rpartition("/")
    spreads = columns.values(f"{prefix}/reward_std") or [abs(value) for value in columns.values(metric)]
    return 0.0 if name == "loss" else LEAST * max(spreads, default=0.0)


class Peak:
    """Search for the best steps of a reward, one step at a time.

    Validations are compared by their recorded errors. In training the means of `WINDOW` steps are compared, and the
    noise is estimated from the differences of consecutive steps.
    """

    def __init__(self, metric: str) -> None:
        self._metric = metric
        self._is_held_out = metric.startswith("validation/")
        self._window = deque[float](maxlen=1 if self._is_held_out else WINDOW)
        self._best = self._now = (0.0, -math.inf, 0.0)  # step, value, error
        self._least = 0.0  # smallest change that counts
        self._squares, self._count = 0.0, 0  # of the differences of consecutive steps

    def look(self, columns: MetricColumns) -> None:
        """Add the next steps. Validations whose error is not known are left out."""
        self._least = max(self._least, least_change(columns, self._metric))
        errors = _held_out_errors(columns, self._metric)
        for step, value in finite_points(columns, self._metric):
            if not self._is_held_out or step in errors:
                self._add(step, value, errors.get(step, 0.0))

    def _add(self, step: float, value: float, error: float) -> None:
        if self._window:
            self._squares += (value - self._window[-1]) ** 2
            self._count += 1
        self._window.append(value)
        if len(self._window) == self._window.maxlen:
            self._now = step, fmean(self._window), error
            if self._now[1] >= self._best[1]:
                self._best = self._now

    @property
    def fall(self) -> Change | None:
        """Fall from the best steps to the last ones; None if it does not count."""
        (first, before, error), (last, after, last_error) = self._best, self._now
        noise, sure = math.hypot(error, last_error), SURE_OF_HELD_OUT_FALL
        if not self._is_held_out:  # sqrt(2 / WINDOW) times the noise of one step
            noise, sure = math.sqrt(self._squares / max(self._count, 1) / WINDOW), SURE_OF_FALL
        change = Change(self._metric, before, after, first, last, noise, 2 * self._least, sure)
        return change if last > first and change.direction < 0 else None


class RewardRange:
    """Lowest and highest reward of a run's rollouts so far."""

    def __init__(self) -> None:
        self.lowest, self.highest = math.inf, -math.inf

    @classmethod
    def of(cls, columns: MetricColumns) -> RewardRange:
        rewards = cls()
        rewards.look(columns)
        return rewards

    def look(self, columns: MetricColumns) -> None:
        """Add the rewards of the next steps."""
        self.lowest = min([self.lowest, *columns.values("rollout/reward_min")])
        self.highest = max([self.highest, *columns.values("rollout/reward_max")])

    @property
    def is_one_value(self) -> bool:
        return self.lowest == self.highest

    def is_highest(self, mean: float, within: float = NEAR) -> bool:
        """Return whether a mean reward is near the highest reward.

        Args:
            within: Distance, as a share of the range.
        """
        return self.lowest < self.highest and mean >= self.highest - within * (self.highest - self.lowest)


def suites_of(columns: Iterable[str]) -> list[str]:
    """Names of the validation suites of a run with several."""
    return [match[1] for name in columns if (match := re.fullmatch(r"validation/([^/]+)/reward_mean", name))]


def finite_points(columns: MetricColumns, metric: str) -> list[tuple[float, float]]:
    return [(step, value) for step, value in columns.points(metric) if math.isfinite(value)]


def _held_out_errors(columns: MetricColumns, metric: str) -> dict[float, float]:
    """Recorded standard errors of validations by step."""
    prefix, _, name = metric.rpartition("/")
    return dict(finite_points(columns, f"{prefix}/reward_error")) if name == "reward_mean" else {}


def step_noise(values: Sequence[float]) -> float:
    """Standard error of one step. Differences of consecutive steps have twice its square, whatever the trend."""
    return math.sqrt(fmean((after - before) ** 2 for before, after in pairwise(values)) / 2)

"""How much better than its siblings a rollout was.

An advantage is a function from the rewards of a group to as many advantages; pass your own to `Rollouter`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean

AdvantageFn = Callable[[Sequence[float]], Sequence[float]]


def group_mean(rewards: Sequence[float]) -> list[float]:
    """Distance from the group's mean, `A_i = r_i - mean(r)`, as in Dr. GRPO (arXiv:2503.20783).

    >>> group_mean([1.0, 0.0, 0.5, 0.5])
    [0.5, -0.5, 0.0, 0.0]
    """
    if not rewards or max(rewards) == min(rewards):
        return [0.0] * len(rewards)
    mean = fmean(rewards)
    return [reward - mean for reward in rewards]


def standardized(rewards: Sequence[float], eps: float = 1e-6) -> list[float]:
    """The same in units of the group's standard deviation, as in GRPO (arXiv:2402.03300, section 4.1).

    `A_i = (r_i - mean(r)) / (std(r) + eps)` with the population standard deviation. Siblings that all have the same
    reward teach nothing: their advantages are 0.

    >>> [round(advantage, 3) for advantage in standardized([1.0, 0.0, 1.0, 0.0])]
    [1.0, -1.0, 1.0, -1.0]
    """
    distances = group_mean(rewards)
    std = fmean(distance**2 for distance in distances) ** 0.5 if distances else 0.0
    return [distance / (std + eps) for distance in distances]


BY_NAME: dict[str, AdvantageFn] = {"standardized": standardized, "group_mean": group_mean}
"""The advantages that `training.advantage` in a config names."""

"""Means with their standard errors, for samples that are not independent of each other if they are of the same
prompt."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

Rewards = Mapping[Any, Sequence[float]]
"""Rewards of the samples of each prompt, by any key of the prompt. A prompt without samples does not count."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Mean over samples, with its standard error.

    Attributes:
        standard_error: Standard error; None if there are fewer than two prompts, which do not show how prompts differ.
    """

    mean: float
    standard_error: float | None
    num_prompts: int
    num_samples: int

    def __str__(self) -> str:
        error = "" if self.standard_error is None else f" ± {self.standard_error:.3f}"
        return f"{self.mean:.3f}{error}"


def clustered_mean(rewards: Rewards) -> Estimate | None:
    """Compute the mean of all samples, with its standard error clustered by prompt.

    With G prompts, n samples in total, and the reward r_gi of sample i of prompt g:

        SE = sqrt(G / (G - 1) * sum_g (sum_i (r_gi - mean))^2) / n

    This is the clustered standard error of Miller, "Adding Error Bars to Evals" (arXiv 2411.00640, section 2.2), with
    the usual correction for few clusters. If all prompts have equally many samples, it is the standard error of the
    mean of the prompts' means: more samples of the same prompts do not make it vanish, but more prompts do.

    Returns:
        The estimate; None if there are no samples.

    >>> str(clustered_mean({"a": [0.0, 0.0], "b": [1.0, 1.0]}))
    '0.500 ± 0.500'
    """
    influences = _influences(rewards)
    if not influences:
        return None
    samples = [reward for group in rewards.values() for reward in group]
    return Estimate(fmean(samples), _root_sum(list(influences.values())), len(influences), len(samples))


@dataclass(frozen=True, slots=True)
class Difference:
    """Difference between two evaluations: the second mean minus the first.

    Attributes:
        num_paired: Number of prompts that both evaluations have. Only these are compared. If it is 0, all prompts of
            both are compared, as independent samples.
    """

    mean: float
    standard_error: float | None
    num_paired: int

    def __str__(self) -> str:
        error = "" if self.standard_error is None else f" ± {self.standard_error:.3f}"
        return f"{self.mean:+.3f}{error}"


def difference(first: Rewards, second: Rewards) -> Difference | None:
    """Compute the second mean minus the first, over the prompts that both have.

    The standard error is that of the clustered mean of the prompts' differences (Miller, section 4.2), in which the
    difficulty that a prompt has for both policies cancels. Without a common prompt, it is sqrt(SE_1^2 + SE_2^2).

    Returns:
        The difference; None if one of the two has no samples.
    """
    common = [key for key, group in first.items() if group and second.get(key)]
    if not common:
        return _unpaired(clustered_mean(first), clustered_mean(second))
    one, two = ({key: rewards[key] for key in common} for rewards in (first, second))
    of_one, of_two = _influences(one), _influences(two)
    mean = _mean(two) - _mean(one)
    return Difference(mean, _root_sum([of_two[key] - of_one[key] for key in common]), len(common))


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Estimate, without bias, the probability that at least one of `k` samples of a prompt is right, from n =
    `num_samples` samples of which c = `num_right` are right: 1 - C(n - c, k) / C(n, k), by Chen et al. (arXiv
    2107.03374).

    >>> pass_at_k(4, 1, 2)
    0.5

    Raises:
        ValueError: `num_samples` is less than `k`.
    """
    if k > num_samples:
        raise ValueError(f"pass@{k} needs at least {k} samples of a prompt; there are {num_samples}")
    if num_samples - num_right < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(num_samples - num_right + 1, num_samples + 1))


def passes_at_k(rewards: Rewards, k: int, success: float) -> dict[Any, list[float]]:
    """Compute pass@k of each prompt that has at least `k` samples, as a list of one value.

    Args:
        success: Least reward of a sample that counts as right.
    """
    return {
        key: [pass_at_k(len(group), sum(reward >= success for reward in group), k)]
        for key, group in rewards.items()
        if len(group) >= k
    }


def averages_at_k(rewards: Rewards, k: int) -> dict[Any, list[float]]:
    """Compute the mean reward of the first `k` samples of each prompt that has at least as many, as a list of one
    value."""
    return {key: [fmean(group[:k])] for key, group in rewards.items() if len(group) >= k}


def _mean(rewards: Rewards) -> float:
    return fmean(reward for group in rewards.values() for reward in group)


def _influences(rewards: Rewards) -> dict[Any, float]:
    """Influence of each prompt's samples on the mean of all samples. The influences add up to 0."""
    count = sum(map(len, rewards.values()))
    if not count:
        return {}
    mean = _mean(rewards)
    return {key: sum(reward - mean for reward in group) / count for key, group in rewards.items() if group}


def _root_sum(influences: Sequence[float]) -> float | None:
    count = len(influences)
    if count < 2:
        return None
    return math.sqrt(count / (count - 1) * math.fsum(influence**2 for influence in influences))


def _unpaired(first: Estimate | None, second: Estimate | None) -> Difference | None:
    if first is None or second is None:
        return None
    errors = (first.standard_error, second.standard_error)
    error = None if None in errors else math.hypot(*(error for error in errors if error is not None))
    return Difference(second.mean - first.mean, error, 0)

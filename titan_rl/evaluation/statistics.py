"""Means with their standard errors, for samples that are not independent of each other if they are of the same
prompt, and prompts that may be repeated."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from titan_rl.core.clusters import NO_CLUSTERS, clustered_error, influences

Rewards = Mapping[Any, Sequence[float]]
"""Rewards of the samples of each prompt, by any key of the prompt. A prompt without samples does not count."""

Clusters = Mapping[Any, Any]
"""Identity of each prompt by its key, equal for prompts that are the same. A prompt without one is distinct."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Mean over samples, with its standard error.

    Attributes:
        standard_error: Standard error; None if there are fewer than two distinct prompts, which do not show how prompts
            differ.
    """

    mean: float
    standard_error: float | None
    num_prompts: int
    num_samples: int
    num_distinct: int

    def __str__(self) -> str:
        error = "" if self.standard_error is None else f" ± {self.standard_error:.3f}"
        return f"{self.mean:.3f}{error}"


def clustered_mean(rewards: Rewards, clusters: Clusters = NO_CLUSTERS) -> Estimate | None:
    """Compute the mean of all samples, with its standard error clustered by distinct prompt.

    With G distinct prompts, n samples in total, and the reward r_gi of sample i of prompt g:

        SE = sqrt(G / (G - 1) * sum_g (sum_i (r_gi - mean))^2) / n

    This is the clustered standard error of Miller, "Adding Error Bars to Evals" (arXiv 2411.00640, section 2.2), with
    the usual correction for few clusters. If all prompts have equally many samples, it is the standard error of the
    mean of the prompts' means: more samples of the same prompts do not make it vanish, but more prompts do.

    Returns:
        The estimate; None if there are no samples.

    >>> str(clustered_mean({"a": [0.0, 0.0], "b": [1.0, 1.0]}))
    '0.500 ± 0.500'
    """
    of_prompts = influences(rewards)
    if not of_prompts:
        return None
    samples = [reward for group in rewards.values() for reward in group]
    num_distinct = len({clusters.get(key, key) for key in of_prompts})
    error = clustered_error(of_prompts, clusters)
    return Estimate(fmean(samples), error, len(of_prompts), len(samples), num_distinct)


@dataclass(frozen=True, slots=True)
class Difference:
    """Difference between two evaluations: the second mean minus the first.

    Attributes:
        num_paired: Number of prompts that both evaluations have. Only these are compared. If it is 0, all prompts of
            both are compared, as independent samples.
        num_distinct: Number of distinct prompts among the paired ones.
    """

    mean: float
    standard_error: float | None
    num_paired: int
    num_distinct: int

    def __str__(self) -> str:
        error = "" if self.standard_error is None else f" ± {self.standard_error:.3f}"
        return f"{self.mean:+.3f}{error}"


def difference(first: Rewards, second: Rewards, clusters: Clusters = NO_CLUSTERS) -> Difference | None:
    """Compute the second mean minus the first, over the prompts that both have.

    The standard error is that of the clustered mean of the prompts' differences (Miller, section 4.2), in which the
    difficulty that a prompt has for both policies cancels, clustered by distinct prompt. Without a common prompt, it is
    sqrt(SE_1^2 + SE_2^2).

    Returns:
        The difference; None if one of the two has no samples.
    """
    common = [key for key, group in first.items() if group and second.get(key)]
    if not common:
        return _unpaired(clustered_mean(first, clusters), clustered_mean(second, clusters))
    one, two = ({key: rewards[key] for key in common} for rewards in (first, second))
    of_one, of_two = influences(one), influences(two)
    error = clustered_error({key: of_two[key] - of_one[key] for key in common}, clusters)
    return Difference(_mean(two) - _mean(one), error, len(common), len({clusters.get(key, key) for key in common}))


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
    return 1.0 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


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


def _unpaired(first: Estimate | None, second: Estimate | None) -> Difference | None:
    if first is None or second is None:
        return None
    errors = (first.standard_error, second.standard_error)
    error = None if None in errors else math.hypot(*(error for error in errors if error is not None))
    return Difference(second.mean - first.mean, error, 0, 0)

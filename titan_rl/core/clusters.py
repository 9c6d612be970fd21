"""Standard errors of means over samples that are not independent of each other if they are of the same prompt."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

NO_CLUSTERS: Mapping[Any, Any] = MappingProxyType({})

FEW_DISTINCT = 20
"""Number of distinct prompts below which a clustered standard error is itself uncertain."""


def influences(rewards: Mapping[Any, Sequence[float]]) -> dict[Any, float]:
    """Influence of each prompt's samples on the mean of all samples. The influences add up to 0."""
    count = sum(map(len, rewards.values()))
    if not count:
        return {}
    mean = math.fsum(reward for group in rewards.values() for reward in group) / count
    return {key: sum(reward - mean for reward in group) / count for key, group in rewards.items() if group}


def clustered_error(of_prompts: Mapping[Any, float], clusters: Mapping[Any, Any] = NO_CLUSTERS) -> float | None:
    """Compute the standard error of a mean from the influences I_p of its prompts, clustered by distinct prompt g:

        SE = sqrt(G / (G - 1) * sum_g (sum_(p in g) I_p)^2)

    Args:
        clusters: Identity of each prompt by its key, equal for prompts that are the same. A missing prompt is distinct.

    Returns:
        The standard error; None if there are fewer than two distinct prompts, which do not show how prompts differ.
    """
    sums: defaultdict[Any, float] = defaultdict(float)
    for key, influence in of_prompts.items():
        sums[clusters.get(key, key)] += influence
    if len(sums) < 2:
        return None
    return math.sqrt(len(sums) / (len(sums) - 1) * math.fsum(total**2 for total in sums.values()))


def repeated_prompts(num_prompts: int, num_distinct: int) -> str | None:
    """Warning that few prompts are distinct because prompts repeat; None if they do not, or enough are distinct."""
    if num_distinct >= min(num_prompts, FEW_DISTINCT):
        return None
    if num_distinct < 2:
        repeated, error = "all the same", "no standard error"
    else:
        repeated, error = f"only {num_distinct} different ones, repeated", "a rough standard error"
    return (
        f"the {num_prompts} held-out prompts are {repeated}, so that their mean has {error}: give the task more "
        "different samples, or a larger held_out"
    )

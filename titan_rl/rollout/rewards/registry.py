"""The advantages by name: the library's own, or the user's as "module:function"."""

from __future__ import annotations

from titan_rl.core.calls.imports import find_function
from titan_rl.rollout.rewards.advantages import (
    AdvantageFn,
    batch_mean,
    group_mean,
    leave_one_out,
    reward,
    standardized,
)

BY_NAME: dict[str, AdvantageFn] = {
    "standardized": standardized,
    "group_mean": group_mean,
    "leave_one_out": leave_one_out,
    "reward": reward,
    "batch_mean": batch_mean,
}
"""The library's own that `training.advantage` names."""


def find_advantage(name: str) -> AdvantageFn:
    """The advantage that `training.advantage` names.

    Raises:
        ConfigError: there is none of that name.
    """
    return find_function("training.advantage", name, BY_NAME)

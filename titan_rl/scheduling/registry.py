"""The filters by name: the library's own, or the user's as "module:function"."""

from __future__ import annotations

from functools import partial
from typing import Any

from titan_rl.core.calls.cancellation import is_ctrl_c
from titan_rl.core.calls.imports import find_function
from titan_rl.core.calls.user_code import describe
from titan_rl.core.errors import DataError
from titan_rl.rollout.types import RolloutGroup
from titan_rl.scheduling.filters import GroupFilter, zero_variance

BY_NAME: dict[str, GroupFilter] = {"zero_variance": zero_variance}
"""The library's own that `scheduling.filters` names."""


def find_filter(name: str) -> GroupFilter:
    """A filter that `scheduling.filters` names. It gives a metric's name or None, or raises DataError.

    Raises:
        ConfigError: there is none of that name.
    """
    return partial(_reason, name, find_function("scheduling.filters", name, BY_NAME))


def _reason(name: str, check: GroupFilter, group: RolloutGroup) -> str | None:
    try:
        reason: Any = check(group)
    except BaseException as error:  # nothing is awaited here, so that a CancelledError is the filter's own
        if is_ctrl_c(error):
            raise
        raise DataError(f"filter {name!r} failed on group {group.group_id!r}: {describe(error)}") from error
    if reason is not None and not isinstance(reason, str):
        raise DataError(
            f"filter {name!r} gave {reason!r} for group {group.group_id!r}; it must give a metric's name, or None to "
            "train on the group"
        )
    return reason

"""Filters: functions from a finished group to the reason why it is not trained on, or None to keep it.

`scheduling.filters` names the filters of a run, and a task adds its own with a method `drop_reason(group)`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from titan_rl.core.calls.cancellation import is_ctrl_c
from titan_rl.core.calls.imports import find_function
from titan_rl.core.calls.user_code import describe
from titan_rl.core.errors import DataError
from titan_rl.rollout.types import RolloutGroup

GroupFilter = Callable[[RolloutGroup], str | None]


EQUAL_REWARDS_ADVICE = (
    "easier samples, or titan-rl sft on demonstrations, where no answer is right yet; a reward that gives something "
    "for part of an answer; a larger rollout.group_size; a higher sampling.temperature; harder samples where all "
    "answers are right"
)
"""Advice for runs whose siblings always earn the same reward."""


def too_few_siblings(group: RolloutGroup, least: int = 2) -> str | None:
    """Drop groups without two siblings (of one seat, if there are several) to compare. The reason names the cause:
    `aborted`, `failed` for errors that are not the policy's, `reward_failed` for a reward, or `too_few_siblings`.

    Args:
        least: Number of siblings that a group needs: 1 in groups of one rollout.
    """
    if group.failure is not None:
        return "reward_failed"
    if any(sum(rollout.advantage is not None for rollout in level) >= least for level in group.compared.values()):
        return None
    if group.is_aborted:
        return "aborted"
    return "failed" if any(rollout.status.is_fault for rollout in group.rollouts) else "too_few_siblings"


def zero_variance(group: RolloutGroup) -> str | None:
    """Drop groups whose siblings, compared per seat, have equal rewards and therefore teach nothing: DAPO's dynamic
    sampling (arXiv:2503.14476)."""
    rewards = [
        {rollout.reward for rollout in level if rollout.advantage is not None} for level in group.compared.values()
    ]
    return "zero_variance" if max(map(len, rewards), default=0) == 1 else None


def too_long(max_tokens: int) -> GroupFilter:
    """Make a filter that drops groups in which every sibling has a context of more than `max_tokens` tokens."""

    def reason(group: RolloutGroup) -> str | None:
        lengths = [
            len(turn.prompt_token_ids) + len(turn.completion.token_ids)
            for rollout in group.rollouts
            for turn in rollout.turns[-1:]
        ]
        return "too_long" if lengths and min(lengths) > max_tokens else None

    return reason


LOST = frozenset({"failed", "reward_failed"})
"""Drop reasons that are errors: `scheduling.max_failed_groups` of them in a row end a run."""


def first_reason(filters: Sequence[GroupFilter], group: RolloutGroup) -> str | None:
    """Reason of the first filter that drops the group."""
    return next((reason for check in filters if (reason := check(group)) is not None), None)


BY_NAME: dict[str, GroupFilter] = {"zero_variance": zero_variance}
"""Built-in filters that `scheduling.filters` can name."""


def find_filter(name: str) -> GroupFilter:
    """Look up a filter of `scheduling.filters`: a built-in one, or "module:function". The returned filter raises
    DataError if the user's function fails or returns anything but a metric's name or None.

    Raises:
        ConfigError: no filter has that name.
    """
    return partial(_reason, name, find_function("scheduling.filters", name, BY_NAME))


def _reason(name: str, check: GroupFilter, group: RolloutGroup) -> str | None:
    try:
        reason: Any = check(group)
    except BaseException as error:  # nothing is awaited here, so a CancelledError is the filter's own
        if is_ctrl_c(error):
            raise
        raise DataError(f"filter {name!r} failed on group {group.group_id!r}: {describe(error)}") from error
    if reason is not None and not isinstance(reason, str):
        raise DataError(
            f"filter {name!r} returned {reason!r} for group {group.group_id!r}; it must return a metric's name, or "
            "None to train on the group"
        )
    return reason

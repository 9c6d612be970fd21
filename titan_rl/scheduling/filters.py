"""Why a finished group is not trained on.

A filter is a function from a group to a reason, or None for a group to keep. `scheduling.filters` names those of a run,
and a task adds its own with a method `drop_reason(group)`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from titan_rl.rollout.types import RolloutGroup

GroupFilter = Callable[[RolloutGroup], str | None]


EQUAL_REWARDS_ADVICE = (
    "easier samples, or titan-rl sft on demonstrations, where no answer is right yet; a reward that gives something "
    "for part of an answer; a larger rollout.group_size; a higher sampling.temperature; harder samples where all "
    "answers are right"
)
"""What to try where siblings always earn the same."""


def too_few_siblings(group: RolloutGroup) -> str | None:
    """An advantage needs two siblings to compare, of one seat where there are several. Where there are fewer, the
    reason says what is to blame: `aborted`, `failed` for errors that are not the policy's, `reward_failed` for a
    reward."""
    if group.failure is not None:
        return "reward_failed"
    if any(sum(rollout.advantage is not None for rollout in of_a_seat) >= 2 for of_a_seat in group.by_seat.values()):
        return None
    if group.is_aborted:
        return "aborted"
    return "failed" if any(rollout.status.is_fault for rollout in group.rollouts) else "too_few_siblings"


def zero_variance(group: RolloutGroup) -> str | None:
    """Siblings with equal rewards, those of each seat among themselves, teach nothing; leaving them out is DAPO's
    dynamic sampling (arXiv:2503.14476)."""
    rewards = [
        {rollout.reward for rollout in of_a_seat if rollout.advantage is not None}
        for of_a_seat in group.by_seat.values()
    ]
    return "zero_variance" if max(map(len, rewards), default=0) == 1 else None


def too_long(max_tokens: int) -> GroupFilter:
    """A filter for groups none of whose siblings fits: each has a context of more than `max_tokens` tokens."""

    def reason(group: RolloutGroup) -> str | None:
        lengths = [
            len(turn.prompt_token_ids) + len(turn.completion.token_ids)
            for rollout in group.rollouts
            for turn in rollout.turns[-1:]
        ]
        return "too_long" if lengths and min(lengths) > max_tokens else None

    return reason


LOST = frozenset({"failed", "reward_failed"})
"""The reasons that are errors: `scheduling.max_failed_groups` of them in a row end a run."""


def first_reason(filters: Sequence[GroupFilter], group: RolloutGroup) -> str | None:
    """What the first filter that objects says."""
    return next((reason for check in filters if (reason := check(group)) is not None), None)

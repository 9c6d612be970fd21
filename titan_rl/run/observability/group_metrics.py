"""Metrics of a step: a flat dict from names with slashes to floats."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, pstdev
from typing import Any

from titan_rl.rollout.types import Rollout, RolloutGroup, RolloutStatus
from titan_rl.training.data.sample_builder import count_branches


def group_metrics(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """Metrics of a step's rollouts: the policy's rewards, and the faults of environments.

    A metric about rewards is absent where no rollout was scored; everything is where there is no rollout.

    Example: two groups of two, with rewards (0, 1) and (1, 1), give among others

        {"rollout/num_groups": 2.0, "rollout/reward_mean": 0.75, "rollout/reward_std": 0.433,
         "rollout/zero_variance_groups": 0.5, "rollout/status/completed": 1.0, "rollout/turns_mean": 1.0}

    Returns:
        rollout/num_groups, rollout/num_rollouts.
        rollout/reward_mean, reward_std (population), reward_min, reward_max: of all scored rollouts. A fault
        that is not the policy's (`RolloutStatus.is_fault`) is none of them, whatever reward the rubric gives it.
        rollout/reward/<name>: mean of one reward of the breakdown over the rollouts that have it.
        rollout/zero_variance_groups: share of the scored groups whose rewards, or those of each seat, are all equal,
        which teach nothing.
        rollout/seat/<seat>/reward_mean: of what one seat did, where environments have several.
        rollout/status/<status>: share of rollouts that ended so, one for each status.
        rollout/completion_tokens_mean, completion_tokens_max: of a rollout, all turns together.
        rollout/turns_mean; rollout/branches_per_rollout: mean number of samples that a rollout's turns make, which is 1
        as long as each prompt extends the one before and its completion.
        rollout/constrained_fraction: share of the completion tokens of which a constraint left others out;
        rollout/constraint_weight_mean: of rollouts with such tokens, the probability that the policy gives to what was
        allowed. Both are absent where nothing was constrained.
        rollout/metrics/<name>: mean of a metric that rollouts carry.
        completion/<name>: mean of a metric that completions carry.
        rollout/values_left_out: rewards and metrics that are no finite number, and so are in no mean.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    if not rollouts:
        return {}
    tokens = [rollout.num_completion_tokens for rollout in rollouts]
    metrics = {
        "rollout/num_groups": float(len(groups)),
        "rollout/num_rollouts": float(len(rollouts)),
        "rollout/completion_tokens_mean": fmean(tokens),
        "rollout/completion_tokens_max": float(max(tokens)),
        "rollout/turns_mean": fmean(len(rollout.turns) for rollout in rollouts),
    }
    if branches := [count_branches(rollout) for rollout in rollouts if rollout.turns]:
        metrics["rollout/branches_per_rollout"] = fmean(branches)
    metrics |= _of_constraints(rollouts)
    for status in RolloutStatus:
        metrics[f"rollout/status/{status}"] = fmean(rollout.status is status for rollout in rollouts)

    num_given = sum(_is_judged(rollout) for rollout in rollouts)
    scored = [seats for group in groups if (seats := _rewards_by_seat(group))]
    flat = [reward for seats in scored for rewards in seats.values() for reward in rewards]
    left_out = num_given - len(flat)
    if scored:
        metrics["rollout/reward_mean"] = fmean(flat)
        metrics["rollout/reward_std"] = pstdev(flat)
        metrics["rollout/reward_min"] = min(flat)
        metrics["rollout/reward_max"] = max(flat)
        metrics["rollout/zero_variance_groups"] = fmean(
            all(min(rewards) == max(rewards) for rewards in seats.values()) for seats in scored
        )
        for seat in sorted({seat for seats in scored for seat in seats if seat is not None}):
            metrics[f"rollout/seat/{seat}/reward_mean"] = fmean(
                reward for seats in scored for reward in seats.get(seat, ())
            )

    completions = [turn.completion for rollout in rollouts for turn in rollout.turns]
    for prefix, records in {
        "rollout/reward/": [rollout.reward_breakdown for rollout in rollouts],
        "rollout/metrics/": [rollout.metrics for rollout in rollouts],
        "completion/": [completion.metrics for completion in completions],
    }.items():
        for name in sorted({name for record in records for name in record}):
            values = [record[name] for record in records if name in record]
            numbers = [number for value in values if (number := finite(value)) is not None]
            left_out += len(values) - len(numbers)
            if numbers:
                metrics[f"{prefix}{name}"] = fmean(numbers)
    metrics["rollout/values_left_out"] = float(left_out)
    return metrics


def _of_constraints(rollouts: Sequence[Rollout]) -> dict[str, float]:
    allowed = [
        [value for turn in rollout.turns for value in turn.completion.allowed_logprobs or () if value < 0]
        for rollout in rollouts
    ]
    constrained = [values for values in allowed if values]
    if not constrained:
        return {}
    num_tokens = sum(rollout.num_completion_tokens for rollout in rollouts)
    return {
        "rollout/constrained_fraction": sum(map(len, constrained)) / num_tokens,
        "rollout/constraint_weight_mean": fmean(math.exp(sum(values)) for values in constrained),
    }


def validation_metrics(groups: Sequence[RolloutGroup], prefix: str = "validation") -> dict[str, float]:
    """`group_metrics` of held-out groups, under names that begin with the prefix.

    The mean reward is of the rollouts that are scored, those of all seats together; `<prefix>/unscored` counts the
    others.
    """
    metrics = {f"{prefix}/{name.removeprefix('rollout/')}": value for name, value in group_metrics(groups).items()}
    unscored = sum(not _is_judged(rollout) for group in groups for rollout in group.rollouts)
    return metrics | {f"{prefix}/unscored": float(unscored)}


def _rewards_by_seat(group: RolloutGroup) -> dict[str | None, list[float]]:
    """Rewards by seat, of the seats that have any."""
    seats = {
        seat: [value for rollout in rollouts if _is_judged(rollout) and (value := finite(rollout.reward)) is not None]
        for seat, rollouts in group.by_seat.items()
    }
    return {seat: rewards for seat, rewards in seats.items() if rewards}


def _is_judged(rollout: Rollout) -> bool:
    return rollout.reward is not None and not rollout.status.is_fault


def finite(value: Any) -> float | None:
    """A number as a float, also one of numpy or torch; None where it is none, or not finite."""
    if isinstance(value, str | bytes):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None

"""Metrics of a step: a flat dict from names with slashes to floats."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, pstdev

from titan_rl.rollout.types import RolloutGroup, RolloutStatus


def group_metrics(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """What a step's rollouts say about the policy and the environment.

    A metric about rewards is absent where no rollout was scored; everything is where there is no rollout.

    Example: two groups of two, with rewards (0, 1) and (1, 1), give among others

        {"rollout/num_groups": 2.0, "rollout/reward_mean": 0.75, "rollout/reward_std": 0.433,
         "rollout/zero_variance_groups": 0.5, "rollout/status/completed": 1.0, "rollout/turns_mean": 1.0}

    Returns:
        rollout/num_groups, rollout/num_rollouts.
        rollout/reward_mean, reward_std (population), reward_min, reward_max: of all scored rollouts.
        rollout/reward/<name>: mean of one reward of the breakdown over the rollouts that have it.
        rollout/zero_variance_groups: share of the scored groups whose rewards are all equal, which teach nothing.
        rollout/status/<status>: share of rollouts that ended so, one for each status.
        rollout/completion_tokens_mean, completion_tokens_max: of a rollout, all turns together.
        rollout/turns_mean.
        rollout/metrics/<name>: mean of a metric that rollouts carry.
        completion/<name>: mean of a metric that completions carry.
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
    for status in RolloutStatus:
        metrics[f"rollout/status/{status}"] = fmean(rollout.status is status for rollout in rollouts)

    rewards = [[rollout.reward for rollout in group.rollouts if rollout.reward is not None] for group in groups]
    scored = [group for group in rewards if group]
    if scored:
        flat = [reward for group in scored for reward in group]
        metrics["rollout/reward_mean"] = fmean(flat)
        metrics["rollout/reward_std"] = pstdev(flat)
        metrics["rollout/reward_min"] = min(flat)
        metrics["rollout/reward_max"] = max(flat)
        metrics["rollout/zero_variance_groups"] = fmean(min(group) == max(group) for group in scored)

    completions = [turn.completion for rollout in rollouts for turn in rollout.turns]
    metrics |= _means("rollout/reward/", [rollout.reward_breakdown for rollout in rollouts])
    metrics |= _means("rollout/metrics/", [rollout.metrics for rollout in rollouts])
    metrics |= _means("completion/", [dict(completion.metrics) for completion in completions])
    return metrics


def _means(prefix: str, records: Sequence[dict[str, float]]) -> dict[str, float]:
    """The mean of each name over the records that have it."""
    names = sorted({name for record in records for name in record})
    return {f"{prefix}{name}": fmean(record[name] for record in records if name in record) for name in names}

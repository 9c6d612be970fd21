"""Rubric: one reward from several reward functions.

A rubric scores the sibling rollouts of one sample. With `combine="mean"`, the default, the reward is the weighted mean
of the values of its functions, and with `combine="sum"` their weighted sum:

    mean:  reward = sum_i weight_i * value_i / sum_i weight_i
    sum:   reward = sum_i weight_i * value_i

Functions with values in [0, 1] have a mean in [0, 1] for any weights, but two of them can have a sum of 2.

Example: mostly the answer counts, a little the format, and an answer that was cut off earns 0:

    rubric = Rubric([Reward(similarity, weight=0.8), Reward(well_formed, weight=0.2)], truncated_reward=0.0)
    await rubric.score(group)
    group.rollouts[0].reward            # 0.74
    group.rollouts[0].reward_breakdown  # {"similarity": 0.675, "well_formed": 1.0}
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any, Literal, cast, get_args

from titan_rl.core.calls.bounded import bounded
from titan_rl.core.calls.cancellation import gather_or_cancel
from titan_rl.core.calls.user_code import describe
from titan_rl.core.console import Console
from titan_rl.core.errors import RewardError
from titan_rl.core.tracing.spans import span
from titan_rl.rollout.policy_text import last_answer
from titan_rl.rollout.rewards.reward import (
    EnvReward,
    FailurePolicy,
    FunctionReward,
    Reward,
    RewardFn,
    UserFunction,
    WeightedReward,
    copy_of,
    finite_numbers,
    subject_of,
)
from titan_rl.rollout.types import Rollout, RolloutGroup, RolloutStatus, compared
from titan_rl.types import float_or_none

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 5.0
"""Time limit for closing one reward."""

Combine = Literal["mean", "sum"]

LARGEST_REWARD = 1e30
"""Largest absolute reward. Its square fits a float, for standard deviations, and advantages made of it fit float32."""


class Rubric:
    """Weighted rewards of a group's rollouts, combined into one reward each; see the module for the formula.

    Rewards receive copies of the rollouts, so their changes affect neither the record nor other rewards. Only the
    `sample` is shared, and routed experts are left out.

    Args:
        rewards: Items of the types `Reward`, `GroupReward` or `env_reward`, at least one. A plain function stands for
            `Reward(function)`.
        combine: "mean" or "sum", see the module. In a sum, weights may be negative, for penalties.
        truncated_reward: Reward of every truncated rollout, for which no functions are called. With None truncated
            rollouts are judged like others.
        error_reward: Reward of every rollout that ended in an error, for which no functions are called. With None such
            rollouts have no reward. With a number, an answer that cannot be parsed (ERROR_PARSE) also has an advantage;
            other errors are not the policy's fault and have none (`RolloutStatus.is_fault`).
        timeout_s: Seconds that one call of a function may take if its reward does not have its own limit.

    Raises:
        ValueError: there are no rewards, an item is not a reward, two share a name, `combine` is unknown, or the
            weights are unusable: for a mean they must not be negative and must add up to more than zero; for a sum one
            must differ from zero.
    """

    def __init__(
        self,
        rewards: Sequence[WeightedReward | RewardFn],
        *,
        combine: Combine = "mean",
        truncated_reward: float | None = None,
        error_reward: float | None = None,
        timeout_s: float = 300.0,
    ) -> None:
        weighted = [_weighted(reward) for reward in rewards]
        names = [reward.name for reward in weighted]
        if not names:
            raise ValueError("the rubric has no rewards; give it at least one, such as Reward(function)")
        if duplicates := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"rewards {duplicates} appear more than once in the rubric; give each its own name=")
        self._divisor = _divisor(weighted, combine)
        for reward in weighted:
            policy = getattr(reward, "on_failure", None)
            if not isinstance(policy, FailurePolicy | None):
                raise ValueError(f"on_failure of reward {reward.name!r} is {policy!r}; it must be a FailurePolicy")
        if not (float_or_none(timeout_s) or 0.0) > 0:
            raise ValueError(f"Rubric timeout_s is {timeout_s!r}; it must be positive")
        self.rewards = tuple(weighted)
        self.combine: Combine = combine
        self.truncated_reward = _fixed("truncated_reward", truncated_reward)
        self.error_reward = _fixed("error_reward", error_reward)
        self.timeout_s = timeout_s

    @property
    def env_rewards(self) -> tuple[str, ...]:
        """Names of the rewards that the environment must give to a completed rollout."""
        return tuple(reward.name for reward in self.rewards if isinstance(reward, EnvReward))

    @property
    def env_weights(self) -> dict[str, float]:
        """Weights of the environment's rewards in the combined reward, by name."""
        return {each.name: each.weight / self._divisor for each in self.rewards if isinstance(each, EnvReward)}

    @property
    def model_folders(self) -> list[str]:
        """Folders of the models that rewards load."""
        folders = (getattr(reward, "model_folder", None) for reward in self.rewards)
        return [folder for folder in folders if isinstance(folder, str)]

    def limit_calls(self, timeout_s: float) -> None:
        """Lower the time limit of every call to `timeout_s`, also of rewards with their own limits."""
        self.timeout_s = min(self.timeout_s, timeout_s)
        for reward in self.rewards:
            if isinstance(reward, FunctionReward) and reward.timeout_s is not None:
                reward.timeout_s = min(reward.timeout_s, timeout_s)

    def show_on(self, console: Console) -> None:
        """Show the outages of judges on a console."""
        for reward in self.rewards:
            if (show_on := getattr(reward, "show_on", None)) is not None:
                show_on(console)

    async def close(self) -> None:
        """Close the connections of the rewards, after the last rollout. Further calls do nothing, and judging opens the
        connections again.

        A failure to close a reward, or to close it within `CLOSE_TIMEOUT_S`, is only logged, so that it hides no other
        error. A `close` that ignores its cancellation is abandoned.
        """
        for reward in self.rewards:
            if getattr(reward, "close", None) is not None:
                try:
                    await bounded(_close(reward), CLOSE_TIMEOUT_S, f"closing reward {reward.name!r}")
                except Exception as error:
                    logger.warning("reward %r could not be closed: %s", reward.name, describe(error))

    async def begin(self, rollout: Rollout) -> dict[str, float]:
        """Judge one rollout before its siblings end, with the rewards of single rollouts. The rollout is not changed.

        Returns:
            Unweighted values by reward name, for `score`.

        Raises:
            RewardError: see `score`.
        """
        if not self.judges(rollout):
            return {}
        early = [reward for reward in self.rewards if _per_rollout(reward)]
        (values,) = await self._judge([rollout], early)
        return values

    async def score(
        self, group: RolloutGroup | Sequence[Rollout], begun: Mapping[str, Mapping[str, float]] | None = None
    ) -> None:
        """Fill in `reward` and `reward_breakdown` (unweighted values by name) of all rollouts, or of none if it fails.

        An aborted or undecided rollout is not judged: its reward stays None.

        Args:
            group: Group, or its rollouts.
            begun: Results of `begin` by rollout id; these calls are not repeated.

        Raises:
            RewardError: a call and its retries failed. Names the function and the rollout; the function's exception is
                the cause. `ends_run` follows the reward's `FailurePolicy`.
        """
        rollouts = group.rollouts if isinstance(group, RolloutGroup) else group
        judged = [rollout for rollout in rollouts if self.judges(rollout)]
        known = [(begun or {}).get(rollout.rollout_id, {}) for rollout in judged]
        missing = [reward for reward in self.rewards if not all(reward.name in values for values in known)]
        late = await self._judge(judged, missing) if judged else []
        scored = [
            self._combined(rollout, {**before, **after})
            for rollout, before, after in zip(judged, known, late, strict=True)
        ]

        for rollout in rollouts:
            if not self.judges(rollout):
                rollout.reward, rollout.reward_breakdown = self._fixed_reward(rollout.status), {}
        for rollout, (reward, breakdown) in zip(judged, scored, strict=True):
            rollout.reward, rollout.reward_breakdown = reward, breakdown
            rollout.metrics |= self._metrics_of(rollout.rollout_id, breakdown)

    def _metrics_of(self, rollout_id: str, values: Mapping[str, float]) -> dict[str, float]:
        """Metrics that judges report for a rollout, and the distances of their values from those of other rewards."""
        metrics: dict[str, float] = {}
        judges = [reward.name for reward in self.rewards if hasattr(reward, "take_metrics")]
        for reward in self.rewards:
            if (take := getattr(reward, "take_metrics", None)) is not None:
                metrics |= take(rollout_id)
                others = (name for name in values if name not in judges[: judges.index(reward.name) + 1])
                metrics |= {f"{reward.name}_vs_{name}": abs(values[reward.name] - values[name]) for name in others}
        return metrics

    def _combined(self, rollout: Rollout, values: Mapping[str, float]) -> tuple[float, dict[str, float]]:
        breakdown = {reward.name: values[reward.name] for reward in self.rewards}
        combined = sum(reward.weight * breakdown[reward.name] for reward in self.rewards) / self._divisor
        if not all(abs(value) <= LARGEST_REWARD for value in (combined, *breakdown.values())):
            error = RewardError(
                f"the rewards {breakdown} of {subject_of([rollout], each=True)} are too large to add up and compare; "
                f"each must be between -{LARGEST_REWARD:g} and {LARGEST_REWARD:g}"
            )
            error.ends_run = False
            raise error
        return combined, breakdown

    def judges(self, rollout: Rollout) -> bool:
        """Whether functions are called for a rollout; otherwise it has a fixed reward or none."""
        if rollout.status is RolloutStatus.TRUNCATED_PROMPT and not rollout.turns:
            return False  # the very first prompt was too long: there is no answer to judge
        if rollout.status.is_truncated:
            return self.truncated_reward is None
        return rollout.status is RolloutStatus.COMPLETED

    def _fixed_reward(self, status: RolloutStatus) -> float | None:
        if status in (RolloutStatus.ABORTED, RolloutStatus.UNDECIDED):
            return None
        return self.truncated_reward if status.is_truncated else self.error_reward

    async def _judge(self, rollouts: Sequence[Rollout], rewards: Sequence[WeightedReward]) -> list[dict[str, float]]:
        """Values of these rewards for each rollout. The first permanent failure cancels the other calls."""
        alone, levels = [[rollout] for rollout in rollouts], compared(rollouts).values()
        calls = [(reward, chunk) for reward in rewards for chunk in (alone if _per_rollout(reward) else levels)]
        results = await gather_or_cancel([self._values(reward, chunk) for reward, chunk in calls])
        judged: dict[int, dict[str, float]] = {id(rollout): {} for rollout in rollouts}
        for (reward, chunk), values in zip(calls, results, strict=True):
            for rollout, value in zip(chunk, values, strict=True):
                judged[id(rollout)][reward.name] = value
        return [judged[id(rollout)] for rollout in rollouts]

    async def _values(self, reward: WeightedReward, rollouts: Sequence[Rollout]) -> list[float]:
        """Values of one call of a reward, with the retries of its policy."""
        policy = getattr(reward, "on_failure", None) or FailurePolicy()
        where = subject_of(rollouts, each=_per_rollout(reward))
        with span(reward.name, "reward", lane="reward", fine=True, of=where):
            for retry in count():
                try:
                    return await self._called(reward, rollouts, where)
                except RewardError as error:
                    wait_s = policy.wait_s(retry, error)
                await asyncio.sleep(wait_s)
        raise AssertionError("the last retry returns or raises")

    async def _called(self, reward: WeightedReward, rollouts: Sequence[Rollout], where: str) -> list[float]:
        copies = [copy_of(rollout) for rollout in rollouts]
        if isinstance(reward, FunctionReward):
            values = await reward.values(copies, self.timeout_s)
        else:
            values = await UserFunction(reward.values, reward.name)(copies, where, self.timeout_s)
        return finite_numbers(values, len(rollouts), reward.name, where)


class TextRubric(Rubric):
    """Rubric of rewards that read the text of an answer. They also judge an answer that ends inside its thought, and
    one that cannot be parsed but has no tool call: its text is known."""

    def judges(self, rollout: Rollout) -> bool:
        if rollout.status is not RolloutStatus.ERROR_PARSE or not rollout.messages:
            return super().judges(rollout)
        last = rollout.messages[-1]
        return last is last_answer(rollout) and not last.get("tool_calls")


async def _close(reward: Any) -> None:
    await reward.close()


def _divisor(rewards: Sequence[WeightedReward], combine: Combine) -> float:
    """Divisor of the weighted sum of the values.

    Raises:
        ValueError: see `Rubric`.
    """
    if combine not in get_args(Combine):
        raise ValueError(f"Rubric combine is {combine!r}; it must be 'mean' or 'sum'")
    weights = {reward.name: _weight_of(reward) for reward in rewards}
    if combine == "sum":
        if not any(weights.values()):
            raise ValueError(f"the rubric's weights {weights} are all 0; one must differ, or every reward is 0")
        return 1.0
    for name, weight in weights.items():
        if weight < 0:
            raise ValueError(
                f"reward {name!r} has weight {weight}; in a mean it must be positive, or 0 for a value that is only "
                'recorded. combine="sum" takes weights of either sign'
            )
    total = sum(weights.values())
    if not 0 < total < math.inf:
        raise ValueError(
            f"the rubric's weights {weights} sum to {total}; for a mean the sum must be positive and finite. "
            'combine="sum" takes weights of either sign'
        )
    return total


def _weighted(reward: Any) -> WeightedReward:
    if hasattr(reward, "values") and hasattr(reward, "weight") and hasattr(reward, "name"):
        return reward
    if callable(reward) and not isinstance(reward, type):
        return Reward(cast("RewardFn", reward))
    raise ValueError(f"the rubric has {reward!r} among its rewards; it must be a reward, such as Reward(function)")


def _weight_of(reward: WeightedReward) -> float:
    weight = float_or_none(reward.weight)
    if weight is None or not math.isfinite(weight):
        raise ValueError(f"reward {reward.name!r} has weight {reward.weight!r}; it must be positive and finite, or 0")
    return weight


def _fixed(field: str, value: Any) -> float | None:
    """Check the fixed reward of a kind of rollouts."""
    if value is None:
        return None
    number = float_or_none(value)
    if number is None or not abs(number) <= LARGEST_REWARD:
        raise ValueError(f"Rubric {field} is {value!r}; it must be finite or None, and at most 1e30 in size")
    return number


def _per_rollout(reward: WeightedReward) -> bool:
    return bool(getattr(reward, "per_rollout", False))

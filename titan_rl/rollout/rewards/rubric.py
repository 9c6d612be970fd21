"""Reward functions and how they add up.

A rubric scores the sibling rollouts of one sample. Its reward is the weighted mean of its functions,

    reward = sum_i weight_i * value_i / sum_i weight_i

so functions with values in [0, 1] give a reward in [0, 1], whatever the weights.

Example: mostly the answer, a little the format, and nothing for an answer that was cut off:

    rubric = Rubric([Reward(similarity, weight=0.8), Reward(well_formed, weight=0.2)], truncated_reward=0.0)
    await rubric.score(group)
    group.rollouts[0].reward            # 0.74
    group.rollouts[0].reward_breakdown  # {"similarity": 0.675, "well_formed": 1.0}
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

from titan_rl.errors import RewardError
from titan_rl.rollout.rewards.reward_calls import (
    SURE_TO_FAIL_AGAIN,
    FailurePolicy,
    UserFunction,
    about,
    checked,
    copy_of,
    together,
)
from titan_rl.rollout.types import Rollout, RolloutGroup, RolloutStatus

RewardFn = Callable[[Rollout], float | Awaitable[float]]
GroupRewardFn = Callable[[Sequence[Rollout]], Sequence[float] | Awaitable[Sequence[float]]]


F = TypeVar("F", bound=Callable[..., Any])


class WeightedReward(Protocol):
    """What a rubric needs of a reward: `Reward`, `GroupReward`, or a class of one's own.

    One with an attribute `per_rollout = True` judges each rollout for itself: it is given one at a time, and may begin
    before its siblings end. One with an attribute `on_failure` is a `FailurePolicy` that says what follows when
    `values` raises.
    """

    @property
    def name(self) -> str: ...

    @property
    def weight(self) -> float: ...

    async def values(self, rollouts: Sequence[Rollout]) -> Sequence[float]:
        """One finite value per rollout.  # [num_rollouts]"""
        ...


class _OfFunction(Generic[F]):
    """What `Reward` and `GroupReward` share: a user's function, its weight, and what follows when it fails."""

    def __init__(
        self,
        fn: F,
        weight: float = 1.0,
        name: str | None = None,
        *,
        in_thread: bool = False,
        max_threads: int = 32,
        timeout_s: float | None = None,
        on_failure: FailurePolicy | None = None,
    ) -> None:
        self.name: str = name or getattr(fn, "__name__", type(fn).__name__)
        self.weight = float(weight)
        if not math.isfinite(self.weight):
            raise ValueError(f"reward {self.name!r} has weight {weight!r}; it must be finite")
        if timeout_s is not None and not timeout_s > 0:
            raise ValueError(f"reward {self.name!r} has timeout_s {timeout_s!r}; it must be positive or None")
        if max_threads < 1:
            raise ValueError(f"reward {self.name!r} has max_threads {max_threads!r}; it must be at least 1")
        self.timeout_s = timeout_s
        self._call = UserFunction(fn, self.name, max_threads if in_thread else None)
        self.on_failure = on_failure or (SURE_TO_FAIL_AGAIN if self._call.only_computes else FailurePolicy())

    async def values(self, rollouts: Sequence[Rollout]) -> Sequence[float]:
        return await self.values_within(rollouts, None)

    async def values_within(self, rollouts: Sequence[Rollout], timeout_s: float | None) -> Sequence[float]:
        """As `values`; a call may take `timeout_s` seconds where the reward has no limit of its own."""
        raise NotImplementedError


class Reward(_OfFunction[RewardFn]):
    """A function of one rollout.

    Args:
        fn: `fn(rollout) -> float`, sync or async. Booleans count as 0 and 1.
        weight: share in the rubric's weighted mean. 0 records the value and leaves the reward alone.
        name: key in `reward_breakdown`; by default `fn.__name__`.
        in_thread: run a sync `fn` in a worker thread. Without it `fn` runs on the event loop, which suits
            anything under some milliseconds; a slower one would hold up every other rollout.
        max_threads: most calls of it at once in threads; others wait, and their time does not count yet. The threads
            are its own, and one that never returns holds up neither other rewards nor the end of the process.
        timeout_s: seconds one call may take; None takes the rubric's limit.
        on_failure: what follows when a call fails. By default it is made again twice if `fn` is async or in a
            thread, and not at all if it only computes; then the group is dropped.

    Raises:
        ValueError: the weight is not finite, or a limit not positive.
    """

    per_rollout = True

    async def values_within(self, rollouts: Sequence[Rollout], timeout_s: float | None) -> Sequence[float]:
        limit = self.timeout_s or timeout_s
        one = [self._call(rollout, about([rollout], each=True), limit) for rollout in rollouts]
        return await together(one)


class GroupReward(_OfFunction[GroupRewardFn]):
    """A function of all sibling rollouts at once: rankings, diversity, one call to a judge.

    Args:
        fn: `fn(rollouts) -> one float per rollout, in order`, sync or async. It sees the siblings that are
            judged: none that is errored, nor a truncated one where the rubric has a `truncated_reward`.
        weight, name, in_thread, max_threads, timeout_s, on_failure: as for `Reward`.

    Raises:
        ValueError: as `Reward`.
    """

    async def values_within(self, rollouts: Sequence[Rollout], timeout_s: float | None) -> Sequence[float]:
        return await self._call(rollouts, about(rollouts), self.timeout_s or timeout_s)


def env_reward(name: str, weight: float = 1.0) -> Reward:
    """The reward that the environment itself gives under `name`, summed over the turns.

    A completed rollout whose environment never gave it is a `RewardError` that lists the names it did give.
    """

    def value(rollout: Rollout) -> float:
        given = [turn.rewards for turn in rollout.turns]
        if rollout.status is RolloutStatus.COMPLETED and not any(name in rewards for rewards in given):
            names = sorted({key for rewards in given for key in rewards})
            raise LookupError(f"the environment gave no reward {name!r}, only {names}")
        return sum(rewards.get(name, 0.0) for rewards in given)

    return Reward(value, weight, name)


class Rubric:
    """Scores rollouts with weighted reward functions; see the module for the formula.

    A reward is given copies of the rollouts: what it changes in them reaches neither the record nor other rewards. Only
    their `sample` is shared, and routed experts are left out.

    Args:
        rewards: the functions, at least one.
        truncated_reward: fixed reward of a truncated rollout, whose functions then do not run.
            None judges it like any other.
        error_reward: fixed reward of an errored rollout, whose functions never run. None leaves its reward None. With
            it an answer that cannot be parsed, which is the policy's own doing, has an advantage like its siblings;
            errors of others have none (`RolloutStatus.is_fault`).
        timeout_s: seconds one call of a function may take, where its reward has no limit of its own.

    Raises:
        ValueError: two rewards share a name, or the weights do not add up to more than zero.
    """

    def __init__(
        self,
        rewards: Sequence[WeightedReward],
        *,
        truncated_reward: float | None = None,
        error_reward: float | None = None,
        timeout_s: float = 300.0,
    ) -> None:
        names = [reward.name for reward in rewards]
        if duplicates := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"rewards {duplicates} appear more than once in the rubric; give each its own name=")
        self._weight_sum = sum(reward.weight for reward in rewards)
        if not 0 < self._weight_sum < math.inf:
            weights = {reward.name: reward.weight for reward in rewards}
            raise ValueError(
                f"the rubric's weights {weights} sum to {self._weight_sum}; the sum must be positive and finite"
            )
        for field, value in (("truncated_reward", truncated_reward), ("error_reward", error_reward)):
            if value is not None and not math.isfinite(value):
                raise ValueError(f"Rubric {field} is {value!r}; it must be finite or None")
        if not timeout_s > 0:
            raise ValueError(f"Rubric timeout_s is {timeout_s!r}; it must be positive")
        self.rewards = tuple(rewards)
        self.truncated_reward = truncated_reward
        self.error_reward = error_reward
        self.timeout_s = timeout_s

    async def begin(self, rollout: Rollout) -> dict[str, float]:
        """Judge one rollout ahead of its siblings, as far as that can be. The rollout stays as it is.

        Returns:
            Unweighted values by reward name, for `score`.

        Raises:
            RewardError: as `score`.
        """
        if not self._judges(rollout):
            return {}
        early = [reward for reward in self.rewards if _per_rollout(reward)]
        (values,) = await self._judge([rollout], early)
        return values

    async def score(
        self,
        group: RolloutGroup | Sequence[Rollout],
        begun: Mapping[str, Mapping[str, float]] | None = None,
    ) -> None:
        """Fill `reward` and `reward_breakdown` (unweighted values by name) in place, all or none.

        An aborted rollout is not judged: its reward stays None.

        Args:
            begun: what `begin` of this rubric gave for some of the rollouts, by rollout id; that is not judged again.

        Raises:
            RewardError: a call failed, and so did its retries. Names the function and the rollout; the function's
                exception is the cause. Its `ends_run` says what the reward's `FailurePolicy` does.
        """
        rollouts = group.rollouts if isinstance(group, RolloutGroup) else group
        judged = [rollout for rollout in rollouts if self._judges(rollout)]
        known = [(begun or {}).get(rollout.rollout_id, {}) for rollout in judged]
        missing = [reward for reward in self.rewards if not all(reward.name in values for values in known)]
        late = await self._judge(judged, missing) if judged else []
        means = [
            self._mean(rollout, {**before, **after}) for rollout, before, after in zip(judged, known, late, strict=True)
        ]

        for rollout in rollouts:
            if not self._judges(rollout):
                rollout.reward, rollout.reward_breakdown = self._fixed_reward(rollout.status), {}
        for rollout, (reward, breakdown) in zip(judged, means, strict=True):
            rollout.reward, rollout.reward_breakdown = reward, breakdown

    def _mean(self, rollout: Rollout, values: Mapping[str, float]) -> tuple[float, dict[str, float]]:
        breakdown = {reward.name: values[reward.name] for reward in self.rewards}
        mean = sum(reward.weight * breakdown[reward.name] for reward in self.rewards) / self._weight_sum
        if not math.isfinite(mean):
            error = RewardError(f"the rewards {breakdown} of {about([rollout], each=True)} are too large to add up")
            error.ends_run = False
            raise error
        return mean, breakdown

    def _judges(self, rollout: Rollout) -> bool:
        if rollout.status is RolloutStatus.TRUNCATED_PROMPT and not rollout.turns:
            return False  # the very first prompt was too long: there is no answer to judge
        if rollout.status.is_truncated:
            return self.truncated_reward is None
        return rollout.status is RolloutStatus.COMPLETED

    def _fixed_reward(self, status: RolloutStatus) -> float | None:
        if status is RolloutStatus.ABORTED:
            return None
        return self.truncated_reward if status.is_truncated else self.error_reward

    async def _judge(self, rollouts: Sequence[Rollout], rewards: Sequence[WeightedReward]) -> list[dict[str, float]]:
        """Of each rollout, the values of these rewards. The first that fails for good ends the others."""
        calls = [
            (reward, chunk)
            for reward in rewards
            for chunk in ([[i] for i in range(len(rollouts))] if _per_rollout(reward) else [range(len(rollouts))])
        ]
        results = await together([self._values(reward, [rollouts[i] for i in chunk]) for reward, chunk in calls])
        judged: list[dict[str, float]] = [{} for _ in rollouts]
        for (reward, chunk), values in zip(calls, results, strict=True):
            for i, value in zip(chunk, values, strict=True):
                judged[i][reward.name] = value
        return judged

    async def _values(self, reward: WeightedReward, rollouts: Sequence[Rollout]) -> list[float]:
        """One call of a reward, made again as its policy says."""
        policy = getattr(reward, "on_failure", None) or FailurePolicy()
        where = about(rollouts, each=_per_rollout(reward))

        async def call() -> list[float]:
            copies = [copy_of(rollout) for rollout in rollouts]
            if isinstance(reward, _OfFunction):
                values = await reward.values_within(copies, self.timeout_s)
            else:
                values = await UserFunction(reward.values, reward.name)(copies, where, self.timeout_s)
            return checked(values, len(rollouts), reward.name, where)

        return await policy.apply(call)


def _per_rollout(reward: WeightedReward) -> bool:
    return bool(getattr(reward, "per_rollout", False))

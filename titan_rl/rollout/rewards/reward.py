"""Rewards: the user's functions that judge a rollout, or all rollouts of a group."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from titan_rl.rollout.rewards.reward_calls import SURE_TO_FAIL_AGAIN, FailurePolicy, UserFunction, about, together
from titan_rl.rollout.types import Rollout, RolloutStatus
from titan_rl.types import float_or_none

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


class FunctionReward(ABC, Generic[F]):
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
        if not callable(fn):
            raise ValueError(f"{type(self).__name__} is given {fn!r}; it must be a function")
        self.name: str = name or getattr(fn, "__name__", type(fn).__name__)
        number = float_or_none(weight)
        if number is None or not math.isfinite(number):
            raise ValueError(f"reward {self.name!r} has weight {weight!r}; it must be finite")
        self.weight = number
        if timeout_s is not None and not (float_or_none(timeout_s) or 0) > 0:
            raise ValueError(f"reward {self.name!r} has timeout_s {timeout_s!r}; it must be positive or None")
        if not isinstance(max_threads, int) or max_threads < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"reward {self.name!r} has max_threads {max_threads!r}; it must be an integer, at least 1")
        self.timeout_s = timeout_s
        self._call = UserFunction(fn, self.name, max_threads if in_thread else None)
        self.on_failure = on_failure or (SURE_TO_FAIL_AGAIN if self._call.only_computes else FailurePolicy())

    async def values(self, rollouts: Sequence[Rollout]) -> Sequence[float]:
        return await self.values_within(rollouts, None)

    @abstractmethod
    async def values_within(self, rollouts: Sequence[Rollout], timeout_s: float | None) -> Sequence[float]:
        """As `values`; a call may take `timeout_s` seconds where the reward has no limit of its own."""


class Reward(FunctionReward[RewardFn]):
    """A function of one rollout.

    Args:
        fn: `fn(rollout) -> float`, sync or async. Booleans count as 0 and 1.
        weight: of the value in the rubric's mean or sum. 0 records the value and leaves the reward alone.
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


class GroupReward(FunctionReward[GroupRewardFn]):
    """A function of all sibling rollouts at once: rankings, diversity, one call to a judge.

    Args:
        fn: `fn(rollouts) -> one float per rollout, in order`, sync or async. It sees the siblings that are
            judged: none that is errored, nor a truncated one where the rubric has a `truncated_reward`. Where the
            environment has several seats, it is called for those of each.
        weight, name, in_thread, max_threads, timeout_s, on_failure: as for `Reward`.

    Raises:
        ValueError: as `Reward`.
    """

    async def values_within(self, rollouts: Sequence[Rollout], timeout_s: float | None) -> Sequence[float]:
        return await self._call(rollouts, about(rollouts), self.timeout_s or timeout_s)


class EnvReward(Reward):
    """What `env_reward` makes: its `name` is one that the environment gives."""


def env_reward(name: str, weight: float = 1.0) -> EnvReward:
    """The reward that the environment itself gives under `name`, summed over the turns.

    A completed rollout whose environment never gave it is a `RewardError` that lists the names it did give. An
    environment that finds in `RolloutPolicy.env_rewards` that it lacks one may say so by its status instead.
    """

    def value(rollout: Rollout) -> float:
        given = [turn.rewards for turn in rollout.turns]
        if rollout.status is RolloutStatus.COMPLETED and not any(name in rewards for rewards in given):
            names = sorted({key for rewards in given for key in rewards})
            raise LookupError(f"the environment gave no reward {name!r}, only {names}")
        return sum(rewards.get(name, 0.0) for rewards in given)

    return EnvReward(value, weight, name)

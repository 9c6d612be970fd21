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

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, cast

from titan_rl.errors import RewardError
from titan_rl.rollout.types import Rollout, RolloutGroup, RolloutStatus

RewardFn = Callable[[Rollout], float | Awaitable[float]]
GroupRewardFn = Callable[[Sequence[Rollout]], Sequence[float] | Awaitable[Sequence[float]]]


class WeightedReward(Protocol):
    """What a rubric needs of a reward: `Reward`, `GroupReward`, or a class of one's own.

    One with an attribute `per_rollout = True` judges each rollout for itself, and so may begin before its siblings end.
    """

    @property
    def name(self) -> str: ...

    @property
    def weight(self) -> float: ...

    async def values(self, rollouts: Sequence[Rollout]) -> list[float]:
        """One finite value per rollout, or a `RewardError` that says whose fault it is.  # [num_rollouts]"""
        ...


class _Named:
    """Name, weight, and the one place where a user's function is called."""

    def __init__(self, fn: Callable[..., Any], weight: float, name: str | None, in_thread: bool) -> None:
        self.name: str = name or getattr(fn, "__name__", type(fn).__name__)
        self.weight = float(weight)
        if not math.isfinite(self.weight):
            raise ValueError(f"reward {self.name!r} has weight {weight!r}; it must be finite")
        self._fn = fn
        self._in_thread = in_thread

    async def _call(self, argument: Any, about: str) -> Any:
        def call() -> Any:
            # Attributed inside the thread: a StopIteration cannot travel through a future.
            try:
                return self._fn(argument)
            except Exception as error:
                raise self._failed(about, error) from error

        result = await asyncio.to_thread(call) if self._in_thread else call()
        if not inspect.isawaitable(result):
            return result
        try:
            return await result
        except Exception as error:
            raise self._failed(about, error) from error

    def _failed(self, about: str, error: Exception) -> RewardError:
        return RewardError(f"reward {self.name!r} failed on {about}: {type(error).__name__}: {error}")

    def _checked(self, value: Any, about: str) -> float:
        try:
            if isinstance(value, str | bytes):
                raise TypeError
            number = float(value)
        except (TypeError, ValueError, OverflowError) as error:
            raise RewardError(f"reward {self.name!r} gave {value!r} for {about}; it must give a number") from error
        if not math.isfinite(number):
            raise RewardError(f"reward {self.name!r} gave {number} for {about}; it must be finite")
        return number


class Reward(_Named):
    """A function of one rollout.

    Args:
        fn: `fn(rollout) -> float`, sync or async. Booleans count as 0 and 1.
        weight: share in the rubric's weighted mean. 0 records the value and leaves the reward alone.
        name: key in `reward_breakdown`; by default `fn.__name__`.
        in_thread: run a sync `fn` in a worker thread. Without it `fn` runs on the event loop, which suits
            anything under some milliseconds; a slower one would hold up every other rollout.

    Raises:
        ValueError: the weight is not finite.
    """

    per_rollout = True

    def __init__(self, fn: RewardFn, weight: float = 1.0, name: str | None = None, *, in_thread: bool = False) -> None:
        super().__init__(fn, weight, name, in_thread)

    async def values(self, rollouts: Sequence[Rollout]) -> list[float]:
        async def value(rollout: Rollout) -> float:
            about = f"rollout {rollout.rollout_id!r}"
            return self._checked(await self._call(rollout, about), about)

        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(value(rollout)) for rollout in rollouts]
        return [task.result() for task in running]


class GroupReward(_Named):
    """A function of all sibling rollouts at once: rankings, diversity, one call to a judge.

    Args:
        fn: `fn(rollouts) -> one float per rollout, in order`, sync or async. It sees the siblings that are
            judged: none that is errored, nor a truncated one where the rubric has a `truncated_reward`.
        weight, name, in_thread: as for `Reward`.

    Raises:
        ValueError: the weight is not finite.
    """

    def __init__(
        self, fn: GroupRewardFn, weight: float = 1.0, name: str | None = None, *, in_thread: bool = False
    ) -> None:
        super().__init__(fn, weight, name, in_thread)

    async def values(self, rollouts: Sequence[Rollout]) -> list[float]:
        about = f"group {rollouts[0].group_id!r}"
        given = await self._call(rollouts, about)
        try:
            given = list(given)
        except TypeError as error:
            raise RewardError(f"reward {self.name!r} gave {given!r} for {about}; it must give a sequence") from error
        if len(given) != len(rollouts):
            raise RewardError(f"reward {self.name!r} gave {len(given)} values for the {len(rollouts)} of {about}")
        return [
            self._checked(value, f"rollout {rollout.rollout_id!r}")
            for value, rollout in zip(given, rollouts, strict=True)
        ]


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

    Args:
        rewards: the functions, at least one.
        truncated_reward: fixed reward of a truncated rollout, whose functions then do not run.
            None judges it like any other.
        error_reward: fixed reward of an errored rollout. None leaves its reward None. Functions never run on one.
        timeout_s: seconds all functions together may take for one group, or for one rollout ahead of it.

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
        if self._weight_sum <= 0:
            weights = {reward.name: reward.weight for reward in rewards}
            raise ValueError(f"the rubric's weights {weights} sum to {self._weight_sum}; the sum must be positive")
        for field, value in (("truncated_reward", truncated_reward), ("error_reward", error_reward)):
            if value is not None and not math.isfinite(value):
                raise ValueError(f"Rubric {field} is {value!r}; it must be finite or None")
        if not timeout_s > 0:
            raise ValueError(f"Rubric timeout_s is {timeout_s!r}; it must be positive")
        self.rewards = tuple(rewards)
        self.truncated_reward = truncated_reward
        self.error_reward = error_reward
        self.timeout_s = timeout_s

    async def begin(self, rollout: Rollout) -> None:
        """Judge one rollout ahead of its siblings, as far as that can be: fills `reward_breakdown` in part.

        Raises:
            RewardError: as `score`.
        """
        if self._judges(rollout):
            early = [reward for reward in self.rewards if getattr(reward, "per_rollout", False)]
            (breakdown,) = await self._judge([rollout], early)
            rollout.reward_breakdown.update(breakdown)

    async def score(self, group: RolloutGroup | Sequence[Rollout]) -> None:
        """Fill `reward` and `reward_breakdown` (unweighted values by name) in place, all or none.

        An aborted rollout is not judged: its reward stays None. What `begin` has judged is not judged again.

        Raises:
            RewardError: a function raised, gave no finite number, or took too long. Names the function and the
                rollout; the function's exception is the cause.
        """
        rollouts = group.rollouts if isinstance(group, RolloutGroup) else group
        judged = [rollout for rollout in rollouts if self._judges(rollout)]
        missing = [
            reward for reward in self.rewards if not all(reward.name in rollout.reward_breakdown for rollout in judged)
        ]
        breakdowns = await self._judge(judged, missing) if judged else []

        for rollout in rollouts:
            if not self._judges(rollout):
                rollout.reward, rollout.reward_breakdown = self._fixed_reward(rollout.status), {}
        for rollout, late in zip(judged, breakdowns, strict=True):
            breakdown = {reward.name: (rollout.reward_breakdown | late)[reward.name] for reward in self.rewards}
            weighted = sum(reward.weight * breakdown[reward.name] for reward in self.rewards)
            rollout.reward, rollout.reward_breakdown = weighted / self._weight_sum, breakdown

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
        running: dict[str, asyncio.Task[list[float]]] = {}
        failure: Exception | None = None
        try:
            async with asyncio.timeout(self.timeout_s), asyncio.TaskGroup() as tasks:
                for reward in rewards:
                    running[reward.name] = tasks.create_task(reward.values(rollouts))
        except TimeoutError as error:
            late = [name for name, task in running.items() if task.cancelled()]
            raise RewardError(
                f"rewards {late} took longer than {self.timeout_s:g} s on group {rollouts[0].group_id!r}; "
                "raise the rubric's timeout_s or make them faster"
            ) from error
        except ExceptionGroup as group:
            failure = _first(group)
        if failure is not None:
            raise failure  # outside the handler, so that its cause stays the function's own exception
        return [{name: task.result()[i] for name, task in running.items()} for i in range(len(rollouts))]


def _first(group: ExceptionGroup[Exception]) -> Exception:
    """The first failure of nested task groups; its siblings were cancelled because of it."""
    error = group.exceptions[0]
    return _first(cast("ExceptionGroup[Exception]", error)) if isinstance(error, ExceptionGroup) else error

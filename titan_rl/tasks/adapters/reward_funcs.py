"""Reward functions as TRL's trainers call them: `reward_func(prompts, completions, **columns)`, of a batch."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from titan_rl.core.errors import RewardError
from titan_rl.rollout.rewards.reward import GroupReward
from titan_rl.rollout.rewards.rubric import Rubric
from titan_rl.rollout.types import Rollout, RolloutGroup

RewardFunc = Callable[..., Any]
Columns = Callable[[Sequence[Rollout]], Mapping[str, Any]]
"""The arguments of a reward function, each a list with one value for each rollout."""


@dataclass(frozen=True, slots=True)
class TrainerState:
    """What there is of transformers' `TrainerState`.

    Args:
        global_step: optimizer steps of the policy that wrote the newest token of the group.
    """

    global_step: int


@dataclass(slots=True)
class _Notes:
    """What the functions said of one rollout beside their values."""

    absent: set[str] = field(default_factory=set[str])  # functions that gave None
    logged: dict[str, float] = field(default_factory=dict[str, float])


class RewardFuncsRubric(Rubric):
    """Judges siblings as TRL judges a batch:

        reward = sum_i weight_i * value_i

    over the functions that gave a value. One that gives None for a rollout has no part in its reward, and a rollout
    for which all give None has no reward, and so no advantage. Async functions run at the same time. What a function
    gives to `log_metric`, and numbers that it gives to `log_extra`, are in the rollouts' `reward_breakdown`.

    Args:
        functions: with a name and a weight each.
        columns: what they are called with, beside `trainer_state`, `log_extra` and `log_metric`.
        in_thread: of functions that are not async.
        done_with: told of rollouts that have been judged, or that never will be.
    """

    def __init__(
        self,
        functions: Sequence[tuple[str, RewardFunc, float]],
        columns: Columns,
        *,
        in_thread: bool = False,
        error_reward: float | None = None,
        done_with: Callable[[Sequence[Rollout]], None] = lambda rollouts: None,
    ) -> None:
        rewards = [self._group_reward(name, fn, in_thread) for name, fn, _ in functions]
        super().__init__(rewards, error_reward=error_reward)
        self._weights = {name: weight for name, _, weight in functions}
        self._columns = columns
        self._done_with = done_with
        self._notes: dict[str, _Notes] = {}  # by rollout id, while their group is judged

    async def score(
        self,
        group: RolloutGroup | Sequence[Rollout],
        begun: Mapping[str, Mapping[str, float]] | None = None,
    ) -> None:
        rollouts = group.rollouts if isinstance(group, RolloutGroup) else group
        try:
            await super().score(rollouts, begun)
            for rollout in rollouts:
                if rollout.reward_breakdown:
                    self._sum_up(rollout, self._notes.get(rollout.rollout_id, _Notes()))
        except RewardError:
            self._done_with(rollouts)
            raise
        finally:
            for rollout in rollouts:
                self._notes.pop(rollout.rollout_id, None)
        self._done_with(rollouts)  # not of those whose judging was cancelled: it begins anew

    def _sum_up(self, rollout: Rollout, notes: _Notes) -> None:
        values = {name: value for name, value in rollout.reward_breakdown.items() if name not in notes.absent}
        rollout.reward = sum(self._weights[name] * value for name, value in values.items()) if values else None
        rollout.reward_breakdown = {**notes.logged, **values}

    def _group_reward(self, name: str, fn: RewardFunc, in_thread: bool) -> GroupReward:
        def call(rollouts: Sequence[Rollout]) -> list[float]:
            return self._noted(name, rollouts, fn(**self._arguments(rollouts)))

        async def awaited(rollouts: Sequence[Rollout]) -> list[float]:
            return self._noted(name, rollouts, await fn(**self._arguments(rollouts)))

        return GroupReward(awaited if is_async(fn) else call, name=name, in_thread=in_thread)

    def _noted(self, name: str, rollouts: Sequence[Rollout], given: Any) -> list[float]:
        """The values of a function, 0 where it gave None."""
        values: list[Any] = list(given)
        for rollout, value in zip(rollouts, values, strict=False):
            absent = self._of(rollout).absent
            (absent.add if value is None else absent.discard)(name)
        return [0.0 if value is None else value for value in values]

    def _arguments(self, rollouts: Sequence[Rollout]) -> dict[str, Any]:
        def log_extra(column: str, values: Sequence[Any]) -> None:
            for rollout, value in zip(rollouts, values, strict=False):
                if isinstance(value, int | float):
                    self._of(rollout).logged[column] = float(value)

        def log_metric(name: str, value: float) -> None:
            log_extra(name, [value] * len(rollouts))

        spans = [span for rollout in rollouts for turn in rollout.turns for span in turn.completion.version_spans]
        state = TrainerState(max((span.version for span in spans), default=0))
        return {
            **self._columns(rollouts),
            "trainer_state": state,
            "log_extra": log_extra,
            "log_metric": log_metric,
        }

    def _of(self, rollout: Rollout) -> _Notes:
        return self._notes.setdefault(rollout.rollout_id, _Notes())


def is_async(fn: RewardFunc) -> bool:
    fn = _unwrapped(fn)
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(getattr(fn, "__call__", None))  # noqa: B004


def name_of(fn: RewardFunc) -> str:
    fn = _unwrapped(fn)
    return getattr(fn, "__name__", type(fn).__name__)


def completion_ids_of(rollout: Rollout) -> list[int]:
    """All tokens after the first prompt, those of tools' answers included.  # [num_tokens]"""
    if not rollout.turns:
        return []
    last = rollout.turns[-1]
    return [*last.prompt_token_ids, *last.completion.token_ids][len(rollout.turns[0].prompt_token_ids) :]


def _unwrapped(fn: RewardFunc) -> RewardFunc:
    while isinstance(fn, functools.partial):
        fn = cast("RewardFunc", fn.func)
    return fn

"""User code written for TRL: reward functions of a batch, and environment classes whose public methods are tools."""

from __future__ import annotations

import functools
import inspect
import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, cast

from titan_rl.core.calls.user_code import is_async
from titan_rl.core.errors import DataError, RewardError
from titan_rl.rollout.environment.types import MessageObservation, MessageStep
from titan_rl.rollout.rewards.reward import GroupReward
from titan_rl.rollout.rewards.rubric import Rubric
from titan_rl.rollout.types import Message, Rollout, RolloutGroup
from titan_rl.tasks import Tool, ToolEnv

RewardFunc = Callable[..., Any]


class RowsOfRollouts(Protocol):
    """Task of the rollouts."""

    def columns(self, rollouts: Sequence[Rollout]) -> Mapping[str, Any]:
        """Keyword arguments of a reward function, each a list with one value for each rollout."""
        ...


@dataclass(frozen=True, slots=True)
class TrainerState:
    """Subset of transformers' `TrainerState`.

    Args:
        global_step: optimizer steps of the policy that wrote the newest token of the group.
    """

    global_step: int


@dataclass(slots=True)
class _Notes:
    """Logged values of one rollout besides its rewards."""

    absent: set[str] = field(default_factory=set[str])  # functions that gave None
    logged: dict[str, float] = field(default_factory=dict[str, float])


class RewardFuncsRubric(Rubric):
    """Rubric that judges siblings as TRL judges a batch:

        reward = sum_i weight_i * value_i

    over the functions that returned a value. A function that returns None for a rollout has no part in its reward. If
    all functions return None, the rollout has no reward and no advantage. Async functions run concurrently. Numbers
    passed to `log_metric` and `log_extra` are added to the rollouts' `reward_breakdown`.

    Args:
        functions: reward functions, each with its name and weight.
        task: gives the arguments of the functions, except `trainer_state`, `log_extra` and `log_metric`.
        instances: environments of the rollouts, which are forgotten when these have been judged.
        in_thread: call functions that are not async in threads.
    """

    def __init__(
        self,
        functions: Sequence[tuple[str, RewardFunc, float]],
        task: RowsOfRollouts,
        instances: Instances,
        *,
        in_thread: bool,
        error_reward: float,
    ) -> None:
        rewards = [self._group_reward(name, fn, in_thread) for name, fn, _ in functions]
        super().__init__(rewards, error_reward=error_reward)
        self._weights = {name: weight for name, _, weight in functions}
        self._task = task
        self._instances = instances
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
            self._instances.forget(rollouts)
            raise
        finally:
            for rollout in rollouts:
                self._notes.pop(rollout.rollout_id, None)
        self._instances.forget(rollouts)  # not if judging was cancelled, since it restarts

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
        """Values of a function, with 0 in the place of None."""
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
            **self._task.columns(rollouts),
            "trainer_state": state,
            "log_extra": log_extra,
            "log_metric": log_metric,
        }

    def _of(self, rollout: Rollout) -> _Notes:
        return self._notes.setdefault(rollout.rollout_id, _Notes())


def name_of(fn: Any) -> str:
    while isinstance(fn, functools.partial):
        fn = cast("functools.partial[Any]", fn).func
    return getattr(fn, "__name__", type(fn).__name__)


def completion_ids_of(rollout: Rollout) -> list[int]:
    """All tokens after the first prompt, including results of tools.  # [num_tokens]"""
    if not rollout.turns:
        return []
    last = rollout.turns[-1]
    return [*last.prompt_token_ids, *last.completion.token_ids][len(rollout.turns[0].prompt_token_ids) :]


NUMBER = "environment"
"""Name of the reward that holds the number of the instance."""
MOST_ENDED = 10_000
"""Most instances kept for judging. The oldest belong to rollouts that will never be judged."""

NOT_TOOLS = ("reset", "get_reward", "close")


@dataclass(frozen=True, slots=True)
class Played:
    """Instance whose rollout has ended.

    Args:
        sample: sample of the rollout; siblings share it.
        stepped: whether it received a reply of the policy.
        reward: result of its own `get_reward`, if it has one.
    """

    instance: Any
    sample: object
    stepped: bool
    reward: float | None


class Instances:
    """Registry of the environment instances of rollouts, for rewards."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._ended: OrderedDict[int, Played] = OrderedDict()
        self._lock = threading.Lock()

    def number(self) -> int:
        return next(self._numbers)

    def ended(self, number: int, played: Played) -> None:
        with self._lock:
            self._ended[number] = played
            while len(self._ended) > MOST_ENDED:
                self._ended.popitem(last=False)

    def of(self, rollout: Rollout) -> Played:
        """Instance of a rollout.

        Raises:
            DataError: its environment has not been closed.
        """
        with self._lock:
            if found := self._places(rollout):
                return self._ended[found[0]]
        raise DataError(f"the environment of rollout {rollout.rollout_id!r} is missing, so it cannot be judged")

    def own_reward(self, instance: Any) -> float | None:
        with self._lock:
            return next((played.reward for played in self._ended.values() if played.instance is instance), None)

    def forget(self, rollouts: Sequence[Rollout]) -> None:
        with self._lock:
            for place in [place for rollout in rollouts for place in self._places(rollout)]:
                self._ended.pop(place, None)

    def _places(self, rollout: Rollout) -> list[int]:
        numbers = [int(turn.rewards[NUMBER]) for turn in rollout.turns if NUMBER in turn.rewards]
        if numbers:
            return [numbers[-1]] if numbers[-1] in self._ended else []
        # For siblings whose first reply was cut off, any instance will do.
        return [
            number for number, played in self._ended.items() if not played.stepped and played.sample is rollout.sample
        ]


class ToolClassEnv(ToolEnv):
    """A `MessageEnv` over an object of a class written for TRL: `reset(**columns)` begins the episode, and its result
    is appended to the last message of the prompt.

    At the end its `get_reward` and `close` are called once, if it has them.

    Args:
        factory: makes the object.
        sample: row of the rollout.
        columns: arguments of `reset`.
        tools: functions besides its methods.
        instances: registers the object for judging.
    """

    def __init__(
        self,
        factory: Callable[[], Any],
        prompt: Sequence[Message],
        sample: object,
        columns: Mapping[str, Any],
        tools: Sequence[object],
        instances: Instances,
    ) -> None:
        self._instance = factory()
        super().__init__(prompt, [*tools, *tools_of_class(self._instance)])
        self._sample = sample
        self._columns = columns
        self._instances = instances
        self._number = instances.number()
        self._stepped = False

    async def reset(self) -> MessageObservation:
        observed = await _awaited(self._instance.reset(**self._columns))
        if observed is not None:
            *before, last = self.messages
            self.messages = [*before, {**last, "content": _joined(last["content"], observed)}]
        return await super().reset()

    async def step(self, message: Message) -> MessageStep:
        self._stepped = True
        step = await super().step(message)
        return replace(step, rewards={**step.rewards, NUMBER: float(self._number)})

    async def close(self) -> None:
        get_reward = getattr(self._instance, "get_reward", None)
        try:
            reward = None if get_reward is None else float(await _awaited(get_reward()))
            self._instances.ended(self._number, Played(self._instance, self._sample, self._stepped, reward))
        finally:
            if callable(close := getattr(self._instance, "close", None)):
                await _awaited(close())


def tools_of_class(instance: Any) -> list[Tool]:
    """Tools made of the public methods of an object.

    Raises:
        ValueError: it has no `reset`, or a method cannot be described; see `Tool.of`.
    """
    kind = cast("type[object]", type(instance))
    if not callable(getattr(instance, "reset", None)):
        raise ValueError(f"{kind.__name__} has no method reset")
    names = [name for name, _ in inspect.getmembers(kind, inspect.isfunction)]
    return [Tool.of(getattr(instance, name)) for name in names if not name.startswith("_") and name not in NOT_TOOLS]


def _joined(content: Any, observed: Any) -> Any:
    """Concatenate texts, or lists of parts."""
    if isinstance(content, str) and isinstance(observed, str):
        return content + observed
    return [*_parts(content), *_parts(observed)]


def _parts(content: Any) -> list[Any]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(cast("list[Any]", content))


async def _awaited(result: Any) -> Any:
    return await result if inspect.isawaitable(result) else result

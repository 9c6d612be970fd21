"""Environments of classes written for TRL, whose public methods are tools."""

from __future__ import annotations

import inspect
import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from cachetools import FIFOCache

from titan_rl.core.errors import DataError
from titan_rl.rollout.environment.types import MessageObservation, MessageStep
from titan_rl.rollout.types import Message, Rollout
from titan_rl.tasks import Tool, ToolEnv

NUMBER = "environment"
"""Name of the reward that holds the number of the instance."""
MOST_ENDED = 10_000
"""Largest number of instances kept for judging. Older ones belong to rollouts that will never be judged."""

NOT_TOOLS = ("reset", "get_reward", "close")


@dataclass(frozen=True, slots=True)
class Played:
    """Instance whose rollout has ended.

    Args:
        instance: The instance.
        sample: Sample of the rollout, which siblings share.
        stepped: Whether the instance received a reply of the policy.
        reward: Result of the instance's `get_reward`, if it has one.
    """

    instance: Any
    sample: object
    stepped: bool
    reward: float | None


class Instances:
    """Registry of the environment instances of rollouts, for rewards."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._ended: FIFOCache[int, Played] = FIFOCache(MOST_ENDED)
        self._lock = threading.Lock()

    def number(self) -> int:
        return next(self._numbers)

    def ended(self, number: int, played: Played) -> None:
        with self._lock:
            self._ended[number] = played

    def of(self, rollout: Rollout) -> Played:
        """Instance of a rollout.

        Raises:
            DataError: the rollout's environment has not been closed.
        """
        with self._lock:
            if found := self._ended_numbers(rollout):
                return self._ended[found[0]]
        raise DataError(f"the environment of rollout {rollout.rollout_id!r} is missing, so it cannot be judged")

    def own_reward(self, instance: Any) -> float | None:
        with self._lock:
            return next((played.reward for played in self._ended.values() if played.instance is instance), None)

    def forget(self, rollouts: Sequence[Rollout]) -> None:
        with self._lock:
            for number in [number for rollout in rollouts for number in self._ended_numbers(rollout)]:
                self._ended.pop(number, None)

    def _ended_numbers(self, rollout: Rollout) -> list[int]:
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

    At the end the object's `get_reward` and `close` are called once, if it has them.

    Args:
        factory: Makes the object.
        prompt: Opening messages.
        sample: Row of the rollout.
        columns: Arguments of `reset`.
        tools: Functions that are tools in addition to the object's methods.
        instances: Registers the object for judging.
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
        ValueError: the object has no `reset`, or a method cannot be described; see `Tool.of`.
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

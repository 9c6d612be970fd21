"""What a run needs to know of the thing it learns: samples, environments, rewards."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from titan_rl.core.calls.cancellation import is_ctrl_c
from titan_rl.core.calls.user_code import describe, place_of, reason, stood_at
from titan_rl.core.errors import DataError
from titan_rl.rollout.environment.seats import SeatedEnv
from titan_rl.rollout.environment.types import AgentEnv, TokenEnv
from titan_rl.rollout.renderer.types import Renderer
from titan_rl.rollout.rewards.rubric import Rubric
from titan_rl.rollout.types import Message, RolloutGroup


@runtime_checkable
class Task(Protocol):
    """A dataset with its environment and rubric.

    `[task] type = "module:Class"` names an implementation that is also a `titan_rl.core.settings.Section`;
    the table's other keys are its fields.
    """

    def train_sample(self, seed: int, index: int) -> Any:
        """Training sample number `index`. It depends on nothing but its arguments, so that one integer is the
        position in the data."""
        ...

    def validation_samples(self, count: int) -> Sequence[Any]:
        """The first `count` held-out samples, the same at every call."""
        ...

    def make_env(self, sample: Any, renderer: Renderer) -> TokenEnv | AgentEnv | SeatedEnv:
        """A fresh environment for one rollout of the sample. For one of chat messages return
        `MessageTokenEnv(env, renderer)`, and where it has several seats `MessageGame(env, renderer, players)`."""
        ...

    def rubric(self) -> Rubric: ...


@runtime_checkable
class FilteringTask(Task, Protocol):
    """A task that leaves out groups of its own choice."""

    def drop_reason(self, group: RolloutGroup) -> str | None:
        """Why a finished training group is not trained on, as a metric's name; None to train on it."""
        ...


@runtime_checkable
class MeasuredTask(Task, Protocol):
    """A task that can say more of a policy than what it earns: how far a player is from unbeatable, for instance."""

    def measure(self, groups: Sequence[RolloutGroup]) -> Mapping[str, float]:
        """Figures by name, of the groups of all held-out samples that were judged."""
        ...


@runtime_checkable
class CheckedTask(Task, Protocol):
    """A task that can say more of its settings than that each is of its type."""

    def check_settings(self) -> None:
        """Called once, when the settings of a run are read, by the user's own process.

        Raises:
            ConfigError: the run could not go well with them.
        """
        ...


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A conversation to learn from: what its assistant says, to what the others say before.

    Args:
        messages: of a whole conversation, the assistant's where a rollout has the policy's.
        tools: that are offered in it, as `MessageObservation.tools`.

    Example: `Demonstration([{"role": "user", "content": "2 + 3?"}, {"role": "assistant", "content": "5"}])`
    """

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, object]] | None = None


DEMONSTRATED_CALL_S: ContextVar[float] = ContextVar("DEMONSTRATED_CALL_S", default=60.0)
"""Longest time of one call into an environment that is played for a demonstration: `rollout.env_timeout_s` of the
settings of a command."""


@runtime_checkable
class DemonstratingTask(Task, Protocol):
    """A task that can show how it is done, so that `titan-rl sft` can teach it."""

    def demonstrations(self, count: int) -> Iterable[Demonstration]:
        """At most so many conversations, the same at every call, and none of a validation sample.

        With `sft.shuffle = false` they are learned in this order, and what comes last stays in the model most.
        """
        ...


@dataclass(frozen=True, slots=True)
class RunContext:
    """The run that a task's rollouts are for, as the process that runs them knows it.

    Args:
        model: the folder of the model.
        folder: the run's own.
        tell: shows a person a line, or writes it to the process's log.
        dry: a group is played to look at the task, before anything is started: nor is a task to start anything.
    """

    model: str
    renderer: Renderer
    max_context: int
    folder: Path
    tell: Callable[[str], object]
    dry: bool = False


@runtime_checkable
class OpenedTask(Task, Protocol):
    """A task that holds something open while its rollouts run, such as a server."""

    def open(self, run: RunContext) -> AbstractAsyncContextManager[object]:
        """Entered in each process that runs rollouts of the task, before the first of them, and left after the last."""
        ...


@asynccontextmanager
async def opened(task: Task, run: RunContext) -> AsyncGenerator[None]:
    """Within the block the task may be asked for environments."""
    if not isinstance(task, OpenedTask):
        yield
        return
    async with task.open(run):
        yield


@contextmanager
def calling(call: str, task: str | None = None) -> Generator[None]:
    """Around a call of a task's method that a run cannot do without.

    Args:
        task: its name, for the message.

    Example:

        with calling(f"train_sample({seed}, {index})"):
            sample = task.train_sample(seed, index)

    Raises:
        DataError: the block raised. Names the call, and the exception with its line.
    """
    try:
        yield
    except BaseException as error:  # nothing is awaited in the block, so that a CancelledError is the method's own
        if is_ctrl_c(error):
            raise
        owner = "the task" if task is None else f"task {task!r}"
        told = reason(error) if isinstance(error, DataError) else describe(error)
        raise DataError(f"{call} of {owner} failed: {told}") from error


def wrong_result(method: Callable[..., object], text: str) -> TypeError:
    """An error about what a method of a task has given, which `calling` tells with the method's line."""
    error = TypeError(text)
    stood_at(error, place_of(method))
    return error


def measured(task: Task, groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """What the task says of the groups of its held-out samples, where it has something to say.

    Raises:
        DataError: it raised, or gave something else than finite numbers by name.
    """
    if not isinstance(task, MeasuredTask):
        return {}
    with calling("measure"):
        given: Any = task.measure(groups)
        figures = {name: float(value) for name, value in given.items()}
        if not all(isinstance(name, str) and math.isfinite(value) for name, value in figures.items()):
            raise wrong_result(task.measure, f"it gave {given!r}; it must give finite numbers by name")
    return figures


def drop_reason(task: FilteringTask, group: RolloutGroup) -> str | None:
    """What the task says of a group.

    Raises:
        DataError: it raised, or gave something else than text or None.
    """
    with calling(f"drop_reason of group {group.group_id!r}"):
        reason: Any = task.drop_reason(group)
        if reason is not None and not isinstance(reason, str):
            told = f"it gave {reason!r}; it must give a metric's name, or None to train on the group"
            raise wrong_result(task.drop_reason, told)
    return reason


def held_out_samples(task: Task, count: int, name: str | None = None) -> list[Any]:
    """The first `count` held-out samples of a task, which may have no end.

    Args:
        name: of the task, for the message.

    Raises:
        DataError: the task raised.
    """
    with calling(f"validation_samples({count})", name):
        return list(islice(task.validation_samples(count), count))

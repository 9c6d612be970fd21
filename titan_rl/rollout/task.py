"""Tasks: protocols for the samples, environments and rewards of a run, and calls of their methods."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from titan_rl.core.calls.cancellation import is_ctrl_c
from titan_rl.core.calls.user_code import describe, reason, record_location, source_location
from titan_rl.core.console import Console
from titan_rl.core.errors import DataError
from titan_rl.core.plain_data import json_line
from titan_rl.rollout.environment.types import AgentEnv, SeatedEnv, TokenEnv
from titan_rl.rollout.renderer.types import Renderer
from titan_rl.rollout.rewards.rubric import Rubric
from titan_rl.rollout.types import Message, Rollout, RolloutGroup


@runtime_checkable
class Task(Protocol):
    """Samples to train on, with their environments and rubric.

    `[task] type = "module:Class"` names an implementation that is also a `titan_rl.core.settings.Section`; the other
    keys of the table are its fields. The base classes in `titan_rl.tasks` implement most of it.

    Example:

        class Spelling(Section):
            length: int = 5  # a setting of [task]

            def train_sample(self, seed, index):
                return "".join(random.Random(f"{seed}/{index}").choices("abc", k=self.length))

            def validation_samples(self, count):
                return [self.train_sample(-1, index) for index in range(count)]

            def make_env(self, sample, renderer):
                return MessageTokenEnv(SpellingEnv(sample), renderer)

            def rubric(self):
                return Rubric([env_reward("spelled")])
    """

    def train_sample(self, seed: int, index: int) -> Any:
        """Training sample number `index`. It must depend only on the arguments, because a run stores only the position
        in the data, and resumes from there."""
        ...

    def validation_samples(self, count: int) -> Sequence[Any]:
        """First `count` held-out samples, the same at every call; fewer if there are not so many."""
        ...

    def make_env(self, sample: Any, renderer: Renderer) -> TokenEnv | AgentEnv | SeatedEnv:
        """Make a fresh environment for one rollout of the sample. For chat messages return
        `MessageTokenEnv(env, renderer)`, with several seats `MessageGame(env, renderer, players)`."""
        ...

    def rubric(self) -> Rubric:
        """Make the rubric that scores the rollouts."""
        ...


@runtime_checkable
class FilteringTask(Task, Protocol):
    """Task with its own filter of groups."""

    def drop_reason(self, group: RolloutGroup) -> str | None:
        """Reason not to train on a finished group, in the form of a metric's name; None to train on it."""
        ...


@runtime_checkable
class KeyedTask(Task, Protocol):
    """Task that knows which of its samples are the same, although they may differ in details such as an id."""

    def key(self, sample: Any) -> str:
        """Identity of a sample, equal for samples that are the same."""
        ...


@runtime_checkable
class SingleTurnTask(Task, Protocol):
    """Task that knows whether a rollout can have a second turn. If it cannot, the model's chat template need not be
    extended."""

    @property
    def is_single_turn(self) -> bool: ...


@runtime_checkable
class TeachingTask(Task, Protocol):
    """Task whose policy can teach itself, by reading more than its own prompt."""

    def teacher_messages(self, rollout: Rollout) -> Sequence[Message]:
        """Messages that the teacher reads instead of the first prompt of a finished rollout: the same question with its
        answer, with the environment's feedback, or with a hint."""
        ...


@runtime_checkable
class MeasuredTask(Task, Protocol):
    """Task with its own validation metrics, such as the exploitability of a policy in a game."""

    def measure(self, groups: Sequence[RolloutGroup]) -> Mapping[str, float]:
        """Metrics by name, computed from all groups of held-out samples that were judged."""
        ...


@runtime_checkable
class CheckedTask(Task, Protocol):
    """Task that checks its settings beyond their types."""

    def check_settings(self) -> None:
        """Check the settings; called once in the user's process when the settings of a run are read.

        Raises:
            ConfigError: the run would fail with them.
        """
        ...


@runtime_checkable
class PromptedTask(Task, Protocol):
    """Task whose opening messages are known before a rollout begins.

    Attributes:
        long_prompts: "leave_out" to run without prompts that leave no room for an answer, or "error" to refuse to run.
    """

    long_prompts: str

    def leave_out_long_prompts(self, renderer: Renderer, max_context: int) -> str:
        """Leave such prompts out of all later samples, and describe them: "3 of 100 prompts, such as row 7 of a.jsonl".
        Empty if there are none. Called once, before the first sample of a run."""
        ...


@runtime_checkable
class ServingTask(Task, Protocol):
    """Task that serves models next to the run."""

    def server_settings(self) -> Mapping[str, Mapping[str, str]]:
        """Settings of each server, such as {"generation.kv_cache_gib": "0.5"}, by the name of the setting that holds
        them, such as "task.seats.second.settings". They are checked when the settings of a run are read."""
        ...


@dataclass(frozen=True, slots=True)
class Demonstration:
    """Conversation whose assistant messages are learned by supervised fine-tuning.

    Args:
        messages: The whole conversation.
        tools: Tools offered in the conversation, as in `MessageObservation.tools`.

    Example: `Demonstration([{"role": "user", "content": "2 + 3?"}, {"role": "assistant", "content": "5"}])`
    """

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, object]] | None = None


DEMONSTRATED_CALL_S: ContextVar[float] = ContextVar("DEMONSTRATED_CALL_S", default=60.0)
"""Time limit of one environment call in a demonstration. A command sets it to its `rollout.env_timeout_s`."""


@runtime_checkable
class DemonstratingTask(Task, Protocol):
    """Task with demonstrations, which `titan-rl sft` teaches."""

    def demonstrations(self, count: int) -> Iterable[Demonstration]:
        """Up to `count` conversations, the same at every call, without those of validation samples.

        With `sft.shuffle = false` they are learned in this order, and the last ones have the strongest effect.
        """
        ...


@dataclass(frozen=True, slots=True)
class RunContext:
    """Run of a task's rollouts, in one of the processes that run them.

    Args:
        model: Folder of the model.
        renderer: Renderer of the environments.
        max_context: Largest number of tokens of prompt and completion together.
        folder: Folder of the run.
        console: Shows lines to the user.
        dry: Whether this is a dry run, which plays a group to check the task. The task must then not start anything.
        versions: Folder of the run's frozen versions, which play in its training groups; None in other cases.
    """

    model: str
    renderer: Renderer
    max_context: int
    folder: Path
    console: Console
    dry: bool = False
    versions: Path | None = None

    def tell(self, text: str) -> None:
        """Show the user one line."""
        self.console.message(text)


@runtime_checkable
class OpenedTask(Task, Protocol):
    """Task with a resource that is open while its rollouts run, such as a server."""

    def open(self, run: RunContext) -> AbstractAsyncContextManager[object]:
        """Context that each process enters before its first rollout, and leaves after its last."""
        ...


def opened(task: Task, run: RunContext) -> AbstractAsyncContextManager[object]:
    """Context in which the task is open and may make environments."""
    return task.open(run) if isinstance(task, OpenedTask) else nullcontext()


@contextmanager
def calling(call: str, task: str | None = None) -> Generator[None]:
    """Context of a call of a task's method, whose exceptions become a `DataError`.

    Args:
        call: Text of the call, for the message.
        task: Name of the task, for the message.

    Example:

        with calling(f"train_sample({seed}, {index})"):
            sample = task.train_sample(seed, index)

    Raises:
        DataError: the block raised. Names the call, and the exception with its line.
    """
    try:
        yield
    except BaseException as error:  # nothing is awaited in the block, so a CancelledError comes from the method
        if is_ctrl_c(error):
            raise
        owner = "the task" if task is None else f"task {task!r}"
        text = reason(error) if isinstance(error, DataError) else describe(error)
        raise DataError(f"{call} of {owner} failed: {text}") from error


def wrong_result(task: Task, method: str, text: str) -> TypeError:
    """Make an error about the result of a task's method. `calling` reports it with the method's line."""
    error = TypeError(text)
    record_location(error, source_location(getattr(task, method)))
    return error


def measured(task: Task, groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """Metrics of a `MeasuredTask` for the groups of its held-out samples; empty for other tasks.

    Raises:
        DataError: the task raised, or did not return finite numbers by name.
    """
    if not isinstance(task, MeasuredTask):
        return {}
    with calling("measure"):
        given: Any = task.measure(groups)
        figures = {name: float(value) for name, value in given.items()}
        if not all(isinstance(name, str) and math.isfinite(value) for name, value in figures.items()):
            raise wrong_result(task, "measure", f"it returned {given!r}; it must return finite numbers by name")
    return figures


def drop_reason(task: FilteringTask, group: RolloutGroup) -> str | None:
    """Reason of the task not to train on a group, or None.

    Raises:
        DataError: the task raised, or returned neither text nor None.
    """
    with calling(f"drop_reason of group {group.group_id!r}"):
        reason: Any = task.drop_reason(group)
        if reason is not None and not isinstance(reason, str):
            text = f"it returned {reason!r}; it must return a metric's name, or None to train on the group"
            raise wrong_result(task, "drop_reason", text)
    return reason


def digest(value: Any) -> str:
    """Compute a digest that is equal for equal values, in any process; "" if the value's text contains memory
    addresses, and so does not identify it."""
    text = json_line(value)
    return "" if _ADDRESS.search(text) else hashlib.sha256(text.encode()).hexdigest()[:16]


def sample_id(task: Task, sample: Any) -> str:
    """Digest of a sample's key, or of the sample if the task has no keys; "" if it cannot be identified."""
    with calling("key"):
        return digest(task.key(sample) if isinstance(task, KeyedTask) else sample)


_ADDRESS = re.compile(r"\bat 0x[0-9a-f]+")


def held_out_samples(task: Task, count: int, name: str | None = None) -> list[Any]:
    """First `count` held-out samples of a task, whose method may return an endless iterable.

    Args:
        task: The task.
        count: Number of samples.
        name: Name of the task, for the message.

    Raises:
        DataError: the task raised.
    """
    with calling(f"validation_samples({count})", name):
        return list(islice(task.validation_samples(count), count))

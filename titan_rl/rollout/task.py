"""What a run needs to know of the thing it learns: samples, environments, rewards."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

from titan_rl.calls.interrupts import is_ctrl_c
from titan_rl.calls.user_code import describe
from titan_rl.errors import DataError
from titan_rl.rollout.environment.types import TokenEnv
from titan_rl.rollout.renderer.types import Renderer
from titan_rl.rollout.rewards.rubric import Rubric
from titan_rl.rollout.types import RolloutGroup


@runtime_checkable
class Task(Protocol):
    """A dataset with its environment and rubric.

    `[task] type = "module:Class"` names an implementation that is also a `titan_rl.config.sections.Section`;
    the table's other keys are its fields.
    """

    def train_sample(self, seed: int, index: int) -> Any:
        """Training sample number `index`. It depends on nothing but its arguments, so that one integer is the
        position in the data."""
        ...

    def validation_samples(self, count: int) -> Sequence[Any]:
        """The first `count` held-out samples, the same at every call."""
        ...

    def make_env(self, sample: Any, renderer: Renderer) -> TokenEnv:
        """A fresh environment for one rollout of the sample. For one of chat messages return
        `MessageTokenEnv(env, renderer)`."""
        ...

    def rubric(self) -> Rubric: ...


@runtime_checkable
class FilteringTask(Task, Protocol):
    """A task that leaves out groups of its own choice."""

    def drop_reason(self, group: RolloutGroup) -> str | None:
        """Why a finished training group is not trained on, as a metric's name; None to train on it."""
        ...


@contextmanager
def calling(call: str) -> Generator[None]:
    """Around a call of a task's method that a run cannot do without.

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
        raise DataError(f"{call} of the task failed: {describe(error)}") from error


def drop_reason(task: FilteringTask, group: RolloutGroup) -> str | None:
    """What the task says of a group.

    Raises:
        DataError: it raised, or gave something else than text or None.
    """
    with calling(f"drop_reason of group {group.group_id!r}"):
        reason: Any = task.drop_reason(group)
        if reason is not None and not isinstance(reason, str):
            raise TypeError(f"it gave {reason!r}; it must give a metric's name, or None to train on the group")
    return reason

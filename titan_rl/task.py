"""What a run needs to know of the thing it learns: samples, environments, rewards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from titan_rl.environment.types import TokenEnv
from titan_rl.renderer.types import Renderer
from titan_rl.rollout.types import RolloutGroup
from titan_rl.rubric import Rubric


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

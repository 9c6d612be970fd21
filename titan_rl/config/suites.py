"""The tables [[validation.suites]]: what a policy is evaluated on in a run."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from titan_rl.config.tasks import NAME, TaskSource
from titan_rl.core.settings import Section


class ValidationSuite(Section):
    """Held-out samples of one task, and how often they are run.

    In TOML it is a table of `[[validation.suites]]`. `task` names one of the run's tasks; for a task that is not
    trained on, the table has its `type` and the fields of its class instead, and `sampling` and `rollout` as in
    `[[tasks]]`. What it does not say is as in `[validation]`.
    """

    name: str = Field(pattern=NAME)
    """In metrics. By default that of its task."""
    task: str | TaskSource
    """One of the run's tasks, by its name."""
    num_prompts: PositiveInt | None = None
    """Held-out samples."""
    samples_per_prompt: PositiveInt | None = None
    """Rollouts of each."""
    temperature: NonNegativeFloat | None = None
    """0 is greedy."""
    interval: NonNegativeInt | None = None
    """Steps between two times that it is run; 0 runs it only before and after."""


SUITE_FIELDS = tuple(name for name in ValidationSuite.model_fields if name != "task")
"""What a table of `[[validation.suites]]` may have beside `task`, or `type` and the fields of the task's class."""


@dataclass(frozen=True, slots=True)
class ResolvedSuite:
    """A suite as it is run, with all that it does not say itself.

    Args:
        prefix: of its metrics.
    """

    name: str
    source: TaskSource
    num_prompts: int
    samples_per_prompt: int
    temperature: float
    interval: int
    prefix: str

    def is_due(self, step: int) -> bool:
        return self.interval > 0 and step % self.interval == 0

    @property
    def group_ids(self) -> str:
        """How the ids of its groups begin. A rollout is sampled by its id."""
        return self.prefix.replace("/", "-")

"""Tables [[tasks]] and [[validation.suites]]: the tasks of a run, and its held-out sets."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, cast

from pydantic import ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, SerializeAsAny

from titan_rl.core.errors import ConfigError
from titan_rl.core.settings import FunctionName, Section
from titan_rl.rollout.rewards.advantages import BY_NAME as ADVANTAGES
from titan_rl.rollout.task import Task
from titan_rl.scheduling.curriculum import Curriculum, InOrder
from titan_rl.scheduling.filters import BY_NAME as FILTERS

NAME = r"^[A-Za-z0-9_-]+$"
"""What a task or a suite may be called: part of a metric's name and of an option's."""


class TaskSampling(Section):
    """Sampling settings of one task, in place of `[sampling]`."""

    max_tokens: PositiveInt | None = None
    """Most tokens of one completion."""
    temperature: PositiveFloat | None = None
    """Of the distribution that is sampled from and trained on."""


class TaskLimits(Section):
    """Rollout limits of one task, in place of those in `[rollout]`."""

    max_turns: PositiveInt | None = None
    """Completions of one rollout."""
    rollout_timeout_s: PositiveFloat | None = None
    """Time that one rollout may use itself."""
    generate_timeout_s: PositiveFloat | None = None
    """Longest time of one completion, interruptions included."""
    env_timeout_s: PositiveFloat | None = None
    """Longest time of one call into the environment."""
    env_in_thread: bool | None = None
    """Each environment runs in a thread of its own."""
    max_retries: NonNegativeInt | None = None
    """Siblings of one group that are run again after an error other than of parsing."""


def name_of(class_name: str) -> str:
    """The name of a task by default: `name_of("AlphabetSort")` is "alphabet_sort"."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z0-9])(?=[A-Z][a-z])", "_", class_name.rpartition(".")[2]).lower()


def _default_name(values: dict[str, Any]) -> str:
    return name_of(type(values["task"]).__name__)


class TaskSource(Section):
    """One of the tasks that a run's groups come from, with its share of them.

    In TOML it is a table of `[[tasks]]`, whose other keys are `type` and the fields of the task's class; where there is
    one task and nothing else is said of it, the table is `[task]`.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    task: SerializeAsAny[Task]
    name: str = Field(default_factory=_default_name, pattern=NAME, validate_default=True)
    """In metrics and on the command line, `--tasks.NAME.weight 2`. By default that of its class, in lower case."""
    weight: float = Field(default=1.0, gt=0)
    """Its share of the groups that are trained on is this in the sum of all weights."""
    sampling: TaskSampling = TaskSampling()
    rollout: TaskLimits = TaskLimits()
    advantage: Annotated[str, FunctionName(tuple(ADVANTAGES), ("rewards",), may_be_class=False)] | None = None
    """How its rewards are compared; by default as training.advantage says."""
    filters: tuple[Annotated[str, FunctionName(tuple(FILTERS), ("group",), may_be_class=False)], ...] | None = Field(
        default=None, strict=False
    )
    """Its finished groups that are not trained on; by default those that scheduling.filters names."""
    curriculum: SerializeAsAny[Curriculum] = InOrder()
    """Which of its samples comes next: a table whose type is in_order, by_difficulty, stages or "module:Class"."""


def is_alone(tasks: Sequence[TaskSource]) -> bool:
    """Whether there is one task of which nothing is said but what it is: the table `[task]`."""
    return len(tasks) == 1 and tasks[0] == TaskSource(task=tasks[0].task)


def tables_by_name(key: str, tables: Any, source: object) -> dict[str, Any]:
    """The tables of `[[tasks]]` or `[[validation.suites]]` by their names, in their order.

    Args:
        key: which of them.
        source: the file, for messages.

    Raises:
        ConfigError: they are no such tables, one has no name, or two have the same.
    """
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in cast("list[Any]", tables)):
        raise ConfigError(f"{source}: {key} must be tables, each under a line [[{key}]]")
    named: dict[str, Any] = {}
    for number, table in enumerate(cast("list[dict[str, Any]]", tables), start=1):
        name = table.get("name", table.get("task", _name_by_type(table.get("type"))))
        if not isinstance(name, str):
            raise ConfigError(f'{source}: number {number} of [[{key}]] has no type = "module:Class", nor a name')
        if name in named:
            raise ConfigError(f"{source}: two of [[{key}]] are named {name!r}; give one of them another name = ...")
        named[name] = table
    return named


def _name_by_type(name: object) -> str | None:
    return name_of(name.rpartition(":")[2]) if isinstance(name, str) else None


SOURCE_FIELDS = tuple(name for name in TaskSource.model_fields if name != "task")
"""What a table of `[[tasks]]` may have beside `type` and the fields of the task's class."""


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
        """Prefix of the IDs of the task's groups. A rollout's sampling is seeded by its ID."""
        return self.prefix.replace("/", "-")

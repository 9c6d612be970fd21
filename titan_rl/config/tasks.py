"""Tables [[tasks]] and [[validation.suites]]: the tasks of a run, and its held-out samples."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, cast

from pydantic import ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, SerializeAsAny

from titan_rl.core.errors import ConfigError
from titan_rl.core.settings import FunctionName, Section, matching
from titan_rl.rollout.rewards.advantages import BY_NAME as ADVANTAGES
from titan_rl.rollout.task import Task
from titan_rl.scheduling.curriculum import Curriculum, InOrder
from titan_rl.scheduling.filters import BY_NAME as FILTERS

Name = Annotated[str, matching(r"[A-Za-z0-9_-]{1,100}", "must be letters, digits, - and _, 1 to 100")]
"""Name of a task, a suite or an adapter, which is part of the names of metrics, options and folders."""


class TaskSampling(Section):
    """Sampling settings of one task, in place of `[sampling]`."""

    max_tokens: PositiveInt | None = None
    """Most tokens of one completion."""
    temperature: PositiveFloat | None = None
    """Temperature of the distribution that is sampled from and trained on."""


class TaskLimits(Section):
    """Rollout limits of one task, in place of those in `[rollout]`."""

    max_turns: PositiveInt | None = None
    """Most completions of one rollout."""
    rollout_timeout_s: PositiveFloat | None = None
    """Time limit of one rollout, not counting time in which its requests wait."""
    generate_timeout_s: PositiveFloat | None = None
    """Longest time of one completion, including interruptions."""
    env_timeout_s: PositiveFloat | None = None
    """Longest time of one call into the environment."""
    env_in_thread: bool | None = None
    """Run each environment in its own thread."""
    max_retries: NonNegativeInt | None = None
    """Retries of siblings, in all for one group, after errors other than parse errors."""


def name_of(class_name: str) -> str:
    """Default name of a task: `name_of("AlphabetSort")` is "alphabet_sort"."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z0-9])(?=[A-Z][a-z])", "_", class_name.rpartition(".")[2]).lower()


def _default_name(values: dict[str, Any]) -> str:
    return name_of(type(values["task"]).__name__)


class TaskSource(Section):
    """Task of a run, with its share of the groups.

    In TOML it is a table of `[[tasks]]`, whose other keys are `type` and the fields of the task's class. If it is the
    only task and none of the settings below is given, the table is `[task]`.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    task: SerializeAsAny[Task]
    name: Name = Field(default_factory=_default_name, validate_default=True)
    """Name in metrics and on the command line, `--tasks.NAME.weight 2`. By default the name of its class, in snake
    case."""
    weight: float = Field(default=1.0, gt=0)
    """Share of the groups that are trained on, relative to the sum of all weights."""
    sampling: TaskSampling = TaskSampling()
    rollout: TaskLimits = TaskLimits()
    advantage: Annotated[str, FunctionName(tuple(ADVANTAGES), ("rewards",), may_be_class=False)] | None = None
    """Advantage function of its groups; by default training.advantage."""
    teacher: str | None = None
    """Teacher of its rollouts; by default training.teacher, and "" for none."""
    filters: tuple[Annotated[str, FunctionName(tuple(FILTERS), ("group",), may_be_class=False)], ...] | None = Field(
        default=None, strict=False
    )
    """Filters of its finished groups; by default scheduling.filters."""
    curriculum: SerializeAsAny[Curriculum] = InOrder()
    """Order of its samples: a table whose type is in_order, by_difficulty, stages or "module:Class"."""


def is_alone(tasks: Sequence[TaskSource]) -> bool:
    """Whether there is a single task, without settings of its own, so that its table is `[task]`."""
    return len(tasks) == 1 and tasks[0] == TaskSource(task=tasks[0].task)


def tables_by_name(key: str, tables: Any, source: object) -> dict[str, Any]:
    """Return the tables of a list, such as `[[tasks]]` or `[[validation.suites]]`, by name, in order.

    Args:
        key: Dotted name of the list, such as "tasks".
        source: File of the tables, for messages.

    Raises:
        ConfigError: `tables` is not a list of tables, a table has no name, or two have the same name.
    """
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in cast("list[Any]", tables)):
        raise ConfigError(f"{source}: {key} must be tables, each under a line [[{key}]]")
    named: dict[str, Any] = {}
    for number, table in enumerate(cast("list[dict[str, Any]]", tables), start=1):
        name = table.get("name", table.get("task", _name_by_type(table.get("type"))))
        if key == "adapters" and not isinstance(name := table.get("name"), str):
            raise ConfigError(f'{source}: number {number} of [[adapters]] has no name; give it a name = "..."')
        if not isinstance(name, str):
            raise ConfigError(f'{source}: number {number} of [[{key}]] has neither type = "module:Class" nor a name')
        if name in named:
            raise ConfigError(f"{source}: two of [[{key}]] are named {name!r}; give one of them another name = ...")
        named[name] = table
    return named


def _name_by_type(name: object) -> str | None:
    return name_of(name.rpartition(":")[2]) if isinstance(name, str) else None


SOURCE_FIELDS = tuple(name for name in TaskSource.model_fields if name != "task")
"""Keys of a table of `[[tasks]]` other than `type` and the fields of the task's class."""


class ValidationSuite(Section):
    """Held-out samples of one task. Settings that are not given are those of `[validation]`.

    In TOML it is a table of `[[validation.suites]]`. `task` names one of the run's tasks; for a task that is not
    trained on, the table has its `type` and the fields of its class instead, and `sampling` and `rollout` as in
    `[[tasks]]`.
    """

    name: Name
    """Name in metrics. By default the name of its task."""
    task: str | TaskSource
    """Name of one of the run's tasks."""
    num_prompts: PositiveInt | None = None
    """Number of held-out samples."""
    samples_per_prompt: PositiveInt | None = None
    """Rollouts of each sample."""
    temperature: NonNegativeFloat | None = None
    """Sampling temperature; 0 is greedy."""
    interval: NonNegativeInt | None = None
    """Steps between runs of the suite; 0 runs it only before and after training."""


SUITE_FIELDS = tuple(name for name in ValidationSuite.model_fields if name != "task")
"""Keys of a table of `[[validation.suites]]` other than `task`, or `type` and the fields of the task's class."""


@dataclass(frozen=True, slots=True)
class ResolvedSuite:
    """Validation suite with all defaults filled in.

    Args:
        prefix: Prefix of the suite's metrics.
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
        """Prefix of the ids of the suite's groups. A rollout's sampling is seeded by its id."""
        return self.prefix.replace("/", "-")

"""Tasks and suites as the tables that TOML has of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from titan_rl.config.class_kinds import type_of
from titan_rl.config.suites import ValidationSuite
from titan_rl.config.tasks import SOURCE_FIELDS, TaskSource, is_alone
from titan_rl.scheduling.mix.registry import BY_NAME as CURRICULA


def dump_tasks(tasks: Sequence[TaskSource]) -> dict[str, Any]:
    """As TOML has them: `load_tasks` of it gives equal ones."""
    if is_alone(tasks):
        return {"task": task_table(tasks[0], exclude_none=True, with_share=False)}
    return {"tasks": [task_table(source, exclude_none=True) for source in tasks]}


def suite_table(suite: ValidationSuite) -> dict[str, Any]:
    """One of `[[validation.suites]]`."""
    table = suite.model_dump(mode="json", exclude_none=True)
    if isinstance(suite.task, str):
        return table
    source = task_table(suite.task, exclude_none=True)
    left_out = {"task", *SOURCE_FIELDS} - {"sampling", "rollout"}
    own = {key: value for key, value in source.items() if key not in left_out}
    return {**own, **{key: value for key, value in table.items() if key != "task"}}


def task_table(source: TaskSource, *, exclude_none: bool = False, with_share: bool = True) -> dict[str, Any]:
    """One of `[[tasks]]`.

    Args:
        exclude_none: leave out what is None, for which TOML has no word.
        with_share: also what is said of it beside the task itself.
    """
    table = source.model_dump(mode="json", exclude_none=exclude_none)
    fields = table.pop("task")
    own: dict[type[object], str] = {known: name for name, known in CURRICULA.items()}
    kind = own.get(type(source.curriculum)) or type_of(source.curriculum)
    table["curriculum"] = {"type": kind, **table["curriculum"]}
    return {"type": type_of(source.task), **fields, **(table if with_share else {})}

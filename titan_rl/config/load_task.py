"""The table `[task]`: a class named by the user, and its fields."""

from __future__ import annotations

import json
from typing import Any, cast

from pydantic import ValidationError
from typing_extensions import get_protocol_members

from titan_rl.calls.imports import find_attribute, import_module
from titan_rl.calls.user_code import describe
from titan_rl.config.explain import Origins, explain
from titan_rl.errors import ConfigError
from titan_rl.rollout.task import CheckedTask, Task
from titan_rl.settings import Section


def load_task(table: Any, origins: Origins) -> Task:
    """Make the task of `[task]`: import the class that `type` names and validate the other keys as its fields.

    Raises:
        ConfigError: there is no such module or class, it is no task, or its settings are wrong.
    """
    if table is None:
        raise ConfigError(f'{origins.of_files()}: the table [task] is missing; it needs type = "module:Class"')
    if not isinstance(table, dict):
        raise ConfigError(f"{origins.of('task')}: task = {table!r} must be a table")
    fields = dict(cast("dict[str, Any]", table))
    name = fields.pop("type", None)
    try:
        task_class = _find_class(name)
    except ConfigError as error:
        raise ConfigError(f"{origins.of('task.type')}: task.type = {name!r}: {error}") from error.__cause__
    try:
        # As JSON, because TOML has lists where a task may declare tuples, and strings where it declares an enum.
        places = {field: origins.folders_for(f"task.{field}") for field in task_class.model_fields}
        task = task_class.model_validate_json(json.dumps(fields, default=str), context={"folders": places})
    except ValidationError as error:
        raise ConfigError(explain(error, task_class, origins, prefix="task")) from None
    return cast("Task", task)


def check_task(task: Task, origins: Origins) -> None:
    """Have a task look at its settings, where it is one that does.

    Raises:
        ConfigError: as the task says, or it failed at that.
    """
    if not isinstance(task, CheckedTask):
        return
    try:
        task.check_settings()
    except ConfigError as error:
        raise ConfigError(f"{origins.of_all()}: {error}") from error.__cause__
    except Exception as error:
        raise ConfigError(f"{origins.of_all()}: the task could not be checked: {describe(error)}") from error


def task_type(task: Task) -> str:
    """The value of `task.type` that names the task's class: `examples.alphabet_sort.task:AlphabetSort`."""
    return f"{type(task).__module__}:{type(task).__qualname__}"


def _find_class(name: object) -> type[Section]:
    if not isinstance(name, str) or name.count(":") != 1:
        raise ConfigError('must be a string "module:Class"')
    module_name, _, class_name = name.partition(":")
    module = import_module(module_name)
    found: object = find_attribute(module, class_name)
    if isinstance(found, type) and issubclass(found, Section):
        missing = _missing_members(found)
        if not missing:
            return found
        problem = f"{class_name} is no task: it lacks {', '.join(missing)}"
    elif found is None:
        problem = f"{module_name} has no {class_name}"
    else:
        problem = f"{class_name} is no subclass of titan_rl.settings.Section"
    tasks = [key for key, value in vars(module).items() if _is_task(value) and _is_of(value, module_name)]
    raise ConfigError(f"{problem}; tasks in {module_name}: {', '.join(tasks) or 'none'}")


def _is_task(found: object) -> bool:
    return isinstance(found, type) and issubclass(found, Section) and not _missing_members(found)


def _is_of(found: object, module_name: str) -> bool:
    """Whether a class is defined there, or below a package of that name, and not merely imported."""
    return f"{found.__module__}.".startswith(f"{module_name}.")


def _missing_members(found: type) -> list[str]:
    lacking = {name for name in get_protocol_members(Task) if not hasattr(found, name)}
    return sorted(lacking | getattr(found, "__abstractmethods__", frozenset[str]()))

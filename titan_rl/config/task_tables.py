"""Task tables `[task]`, `[[tasks]]` and `[[validation.suites]]`, from which objects of the classes that `type` names
are built."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from pydantic import ValidationError
from typing_extensions import get_protocol_members

from titan_rl.config.tasks import SOURCE_FIELDS, SUITE_FIELDS, TaskSource, ValidationSuite, is_alone
from titan_rl.config.unchecked_tables import fields_of, give, validated, without_unset
from titan_rl.config.validation_errors import COMMAND_LINE, Origins, explain, nearest
from titan_rl.core.calls.imports import find_attribute, import_module
from titan_rl.core.calls.threads import call_within
from titan_rl.core.calls.user_code import describe
from titan_rl.core.errors import ConfigError
from titan_rl.core.settings import INNER, Section
from titan_rl.rollout.task import CheckedTask, Task
from titan_rl.scheduling.curriculum import CURRICULA, Curriculum


@dataclass(frozen=True, slots=True)
class ClassKind:
    """Kind of classes that a `type` may name."""

    noun: str
    plural: str
    protocol: type
    own: Mapping[str, type[Section]] = field(default_factory=dict[str, type[Section]])  # built-in classes, by name


TASK = ClassKind("task", "tasks", Task)
CURRICULUM = ClassKind("curriculum", "curricula", Curriculum, CURRICULA)


def find_class(kind: ClassKind, name: object) -> type[Section]:
    """Find the class that a `type` names.

    Args:
        name: "module:Class", a name in `kind.own`, or a class.

    Raises:
        ConfigError: The module or the class does not exist, or the class is not of this kind.
    """
    if isinstance(name, type) and issubclass(name, Section):
        return name  # from an object that was given in Python
    if isinstance(name, str) and name in kind.own:
        return kind.own[name]
    if not isinstance(name, str) or name.count(":") != 1:
        known = f"one of {', '.join(kind.own)}, or " if kind.own else ""
        raise ConfigError(f'must be {known}a string "module:Class"')
    module_name, _, class_name = name.partition(":")
    module = import_module(module_name)
    found: object = find_attribute(module, class_name)
    if isinstance(found, type) and issubclass(found, Section):
        missing = _missing_members(kind, found)
        if not missing:
            return found
        problem = f"{class_name} is not a {kind.noun}: it lacks {', '.join(missing)}"
    elif found is None:
        problem = f"{module_name} has no {class_name}"
    else:
        problem = f"{class_name} is not a subclass of titan_rl.core.settings.Section"
    candidates = [
        key
        for key, value in vars(module).items()
        if isinstance(value, type)
        and issubclass(value, Section)
        and not _missing_members(kind, value)
        and f"{value.__module__}.".startswith(f"{module_name}.")  # not merely imported there
    ]
    raise ConfigError(f"{problem}; {kind.plural} in {module_name}: {', '.join(candidates) or 'none'}")


def _missing_members(kind: ClassKind, found: type) -> list[str]:
    lacking = {name for name in get_protocol_members(kind.protocol) if not hasattr(found, name)}
    return sorted(lacking | getattr(found, "__abstractmethods__", frozenset[str]()))


def type_of(made: object) -> str:
    """Return the value of `type` that names an object's class: `examples.alphabet_sort.task:AlphabetSort`."""
    return f"{type(made).__module__}:{type(made).__qualname__}"


def dump_tasks(tasks: Sequence[TaskSource]) -> dict[str, Any]:
    """Dump tasks as TOML tables, from which `load_tasks` builds equal tasks."""
    if not tasks:
        return {}
    if is_alone(tasks):
        return {"task": task_table(tasks[0], exclude_none=True, with_share=False)}
    return {"tasks": [task_table(source, exclude_none=True) for source in tasks]}


def suite_table(suite: ValidationSuite) -> dict[str, Any]:
    """Dump a suite as a table of `[[validation.suites]]`."""
    table = suite.model_dump(mode="json", exclude_none=True)
    if isinstance(suite.task, str):
        return table
    source = task_table(suite.task, exclude_none=True)
    left_out = {"task", *SOURCE_FIELDS} - {"sampling", "rollout"}
    own = {key: value for key, value in source.items() if key not in left_out}
    return {**own, **{key: value for key, value in table.items() if key != "task"}}


def task_table(source: TaskSource, *, exclude_none: bool = False, with_share: bool = True) -> dict[str, Any]:
    """Dump a task as a table of `[[tasks]]`.

    Args:
        exclude_none: Whether to omit None, which TOML cannot express.
        with_share: Whether to include the settings of the `TaskSource`, not only those of the task.
    """
    table = source.model_dump(mode="json", exclude_none=exclude_none)
    fields = table.pop("task")
    own: dict[type[object], str] = {known: name for name, known in CURRICULA.items()}
    kind = own.get(type(source.curriculum)) or type_of(source.curriculum)
    table["curriculum"] = {"type": kind, **table["curriculum"]}
    return {"type": type_of(source.task), **fields, **(table if with_share else {})}


def load_tasks(tables: dict[str, Any], origins: Origins, *, needs_task: bool = True) -> tuple[TaskSource, ...]:
    """Build the tasks of `[task]` or of `[[tasks]]`, and remove these tables from `tables`.

    The classes that `type` names are imported, and the other keys are validated as fields of the class or of a
    `TaskSource`. A supervised run needs no task if `sft.data` is set.

    Args:
        tables: Tables of all settings, with those of `[[tasks]]` by name, as `tables_by_name` returns them.
        needs_task: Whether a task is needed even so.

    Raises:
        ConfigError: The tables have no task, or tables of both kinds; or a module or class does not exist, a class is
            not a task, or its settings are wrong.
    """
    one, several = tables.pop("task", None), tables.pop("tasks", None)
    if one is None and several is None and not needs_task and _has_demonstrations(tables):
        return ()
    if one is None and several is None:
        raise ConfigError(
            f'{origins.of_files()}: the table [task] is missing; it needs type = "module:Class". Several tasks '
            "are tables [[tasks]]"
        )
    if one is not None and several is not None:
        if origins.of("tasks") == COMMAND_LINE and isinstance(several, dict):
            of_tasks = cast("dict[str, Any]", several).items()
            options = [f"--tasks.{name}.{key}" for name, table in of_tasks for key in fields_of(table, name, origins)]
            raise ConfigError(
                f"command line: {', '.join(options) or '--tasks'}: there is one [task], whose settings are options "
                "--task.NAME; a weight or other overrides require a table [[tasks]] in the file"
            )
        raise ConfigError(f"{origins.of_all()}: there is [task] as well as [[tasks]]; write all tasks as [[tasks]]")
    if several is None:
        return (TaskSource(task=load_task(one, origins)),)
    if not isinstance(several, dict):
        raise ConfigError(f"{origins.of('tasks')}: tasks = {several!r} must be tables, each under a line [[tasks]]")
    tables_of = cast("dict[str, Any]", several)
    typed = [name for name, table in tables_of.items() if not isinstance(table, dict) or "type" in table]
    for name in tables_of:
        if name not in typed:
            near = nearest(name, typed)
            meant = f"nearest: tasks.{near}; " if near else ""
            typed_text = f"tasks with one: {', '.join(typed) or 'none'}"
            raise ConfigError(
                f'{origins.of(f"tasks.{name}")}: tasks.{name} has no type = "module:Class"; {meant}{typed_text}'
            )
    return tuple(_load_source(name, table, origins) for name, table in tables_of.items())


def _has_demonstrations(tables: Mapping[str, Any]) -> bool:
    sft: Any = tables.get("sft")
    return isinstance(sft, dict) and bool(cast("dict[str, Any]", sft).get("data"))


def with_settings(
    sources: tuple[TaskSource, ...], given: Mapping[str, object], origins: Origins
) -> tuple[TaskSource, ...]:
    """Replace some settings of tasks. Tasks without new settings stay the same objects.

    Args:
        given: Python values by dotted setting, such as "task.words" or "tasks.NAME.weight".

    Raises:
        ConfigError: A table is wrong; see `load_tasks`.
    """
    if not given:
        return sources
    alone = is_alone(sources)
    named = {source.name: _table_of_objects(source, with_share=not alone) for source in sources}
    tables: dict[str, Any] = {"task": named[sources[0].name]} if alone else {"tasks": named}
    give(tables, given, origins)
    before = {source.name: source for source in sources}
    touched = {key.split(".")[1] for key in given if key.startswith("tasks.")}
    loaded = load_tasks(tables, origins)
    return loaded if alone else tuple(s if s.name in touched else before.get(s.name, s) for s in loaded)


def _table_of_objects(source: TaskSource, *, with_share: bool) -> dict[str, Any]:
    """Dump a task's table with classes instead of their names, so that they need not be importable; see
    `task_table`."""
    table = task_table(source, with_share=with_share)
    own = {"curriculum": {**table["curriculum"], "type": type(source.curriculum)}} if with_share else {}
    return {**table, **own, "type": type(source.task)}


def load_suites(tables: dict[str, Any], origins: Origins) -> None:
    """Replace the tables of `[[validation.suites]]` by suites, in place.

    Args:
        tables: Tables of all settings, with those of suites by name, as `tables_by_name` returns them.

    Raises:
        ConfigError: A table is wrong; see `load_tasks`.
    """
    validation: Any = tables.get("validation")
    if not isinstance(validation, dict) or "suites" not in validation:
        return
    suites: Any = cast("dict[str, Any]", validation)["suites"]
    if not isinstance(suites, dict):
        raise ConfigError(f"{origins.of('validation.suites')}: validation.suites = {suites!r} must be tables")
    made = [_load_suite(name, table, origins) for name, table in cast("dict[str, Any]", suites).items()]
    tables["validation"] = {**validation, "suites": made}


def _load_suite(name: str, table: Any, origins: Origins) -> ValidationSuite:
    prefix = f"validation.suites.{name}"
    fields = fields_of(table, prefix, origins)
    own = {"name": name} | {key: fields.pop(key) for key in SUITE_FIELDS if key in fields}
    if "type" in fields:
        extra_names = ("sampling", "rollout")
        of_task = {key: fields.pop(key) for key in extra_names if key in fields}
        task = load_task(fields, origins, prefix, extra_names=(*SUITE_FIELDS, *extra_names))
        fields = {"task": validated(TaskSource, {"task": task, "name": own["name"], **of_task}, origins, prefix)}
    return validated(ValidationSuite, {**own, **fields}, origins, prefix)


def _load_source(name: str, table: Any, origins: Origins) -> TaskSource:
    prefix = f"tasks.{name}"
    fields = fields_of(table, prefix, origins)
    own = {"name": name} | {key: fields.pop(key) for key in SOURCE_FIELDS if key in fields}
    if "curriculum" in own:
        own["curriculum"] = _load(CURRICULUM, own["curriculum"], origins, f"{prefix}.curriculum")
    task = load_task(fields, origins, prefix, extra_names=SOURCE_FIELDS)
    return validated(TaskSource, {"task": task, **own}, origins, prefix)


def load_task(table: Any, origins: Origins, prefix: str = "task", extra_names: Sequence[str] = ()) -> Task:
    """Build a task: import the class that `type` names, and validate the other keys as its fields.

    Args:
        prefix: Dotted name of the table.
        extra_names: Names of further keys of the table that are not fields of the task.

    Raises:
        ConfigError: The module or the class does not exist, the class is not a task, or its settings are wrong.
    """
    return cast("Task", _load(TASK, table, origins, prefix, extra_names))


def _load(kind: ClassKind, table: Any, origins: Origins, prefix: str, extra_names: Sequence[str] = ()) -> Section:
    fields = fields_of(table, prefix, origins)
    name = fields.pop("type", None)
    try:
        found = find_class(kind, name)
    except ConfigError as error:
        raise ConfigError(f"{origins.of(f'{prefix}.type')}: {prefix}.type = {name!r}: {error}") from error.__cause__
    if taken := [key for key in found.model_fields if key in extra_names]:
        raise ConfigError(
            f"{origins.of(f'{prefix}.type')}: {prefix}.type = {name!r}: the class has a field {taken[0]!r}, which is a "
            f"setting of all [[{prefix.rpartition('.')[0]}]]; give that field another name"
        )
    folders = {field: origins.folders_for(f"{prefix}.{field}") for field in found.model_fields}
    folders[INNER] = origins.folders_for(prefix)
    try:
        # Validated as JSON, because TOML has lists where a field may be a tuple, and strings where it may be an enum.
        given = json.dumps(without_unset(found, fields), default=str)
        return found.model_validate_json(given, context={"folders": folders})
    except ValidationError as error:
        raise ConfigError(explain(error, found, origins, prefix, extra_names)) from None


CHECK_LIMIT_S = 60.0
"""Time limit of a task's check of its settings, in seconds."""


def check_task(task: Task, origins: Origins, prefix: str = "task") -> None:
    """Call a task's own check of its settings, if it has one. Errors of the check name settings `task.x`; in the
    message, `task` is replaced by the name of the table.

    Args:
        prefix: Dotted name of the task's table.

    Raises:
        ConfigError: The task refuses a setting, or the check failed.
    """
    if not isinstance(task, CheckedTask):
        return
    try:
        call_within(task.check_settings, CHECK_LIMIT_S, "check_settings()")
    except ConfigError as error:
        problem = re.sub(r"(?<![\w.])task\.(?=\w)", f"{prefix}.", str(error))
        named = problem if f"{prefix}." in problem else f"{prefix}: {problem}"
        raise ConfigError(f"{origins.of_all()}: {named}") from error.__cause__
    except Exception as error:
        raise ConfigError(f"{origins.of_all()}: [{prefix}] could not be checked: {describe(error)}") from error

"""Settings that Python gives in the place of TOML: a config, a task, functions."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from titan_rl.config.class_kinds import type_of
from titan_rl.config.explain import ARGUMENTS, Origins, explain
from titan_rl.config.functions import check_functions, named_modules
from titan_rl.config.load import load_config
from titan_rl.config.load_task import check_task, with_settings
from titan_rl.config.model_folder import check_chat_template, check_model_folder, check_training_fit, find_model_folder
from titan_rl.config.run import RunConfig
from titan_rl.config.search_path import SearchPath
from titan_rl.config.tables import dotted
from titan_rl.config.tasks import TaskSource
from titan_rl.config.unset import without_unset
from titan_rl.core.calls.imports import find_attribute
from titan_rl.core.errors import ConfigError
from titan_rl.core.settings import Section
from titan_rl.rollout.task import Task

ConfigLike = RunConfig | str | Path | Sequence[str | Path]
"""A config, or the TOML files of one."""

IN_OTHER_PROCESSES = ("training.loss", "training.optimizer", "generation.engine", "statedict.transport")
"""Settings that name functions which the trainer's process calls, or a generator's."""

TaskLike = Task | Sequence[TaskSource]
"""One task, or several with their shares."""


def given_config(
    config: ConfigLike,
    *,
    task: TaskLike | None = None,
    functions: Mapping[str, Callable[..., Any] | str | None],
    overrides: Mapping[str, object] | None = None,
    check_files: bool,
) -> RunConfig:
    """The config with what is given in the place of its settings.

    Args:
        task: in the place of those of the config.
        functions: by the setting that names one, such as "training.loss": a function of a module, or its name.
        overrides: other settings by their dotted names, those of tasks too, as on the command line.
        check_files: look into the model folder and the tasks' files too.

    Raises:
        ConfigError: a setting is wrong, or a function is none that other processes could import.
        ModelError: the model folder lacks a file.
    """
    changes = dict(dotted(overrides or {}))
    for setting, function in functions.items():
        if function is not None:
            changes[setting] = function if isinstance(function, str) else name_function(setting, function)
    if isinstance(config, RunConfig):
        config = _with_checked_tasks(_changed(config, task, changes))
        return _with_checked_files(config) if check_files else config
    of_tasks = {} if task is None else {key: value for key, value in changes.items() if _is_of_tasks(key)}
    of_files = {key: value for key, value in changes.items() if key not in of_tasks}
    config = load_config(config, given=of_files, check_files=check_files)
    return config if task is None else _with_checked_tasks(_changed(config, task, of_tasks))


def _with_checked_tasks(config: RunConfig) -> RunConfig:
    for table, source in config.tables_of_tasks():
        check_task(source.task, Origins(()), table)
    return config


def _with_checked_files(config: RunConfig) -> RunConfig:
    """What `load_config` does for one that comes from TOML."""
    places = [Path()]
    folder = find_model_folder(config.model.path, places)
    if folder is not None:
        config = config.model_copy(update={"model": config.model.model_copy(update={"path": str(folder)})})
    check_model_folder(config.model, config.generation, places)
    check_chat_template(config.model)
    check_training_fit(config)
    return config


def name_function(setting: str, function: Callable[..., Any]) -> str:
    """The "module:function" by which a setting names it.

    Raises:
        ConfigError: nobody who imports that finds it.
    """
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    there = sys.modules.get(str(module))
    if name is None or there is None or find_attribute(there, name) is not function:
        raise ConfigError(
            f"{setting} = {function!r} has no name by which it can be imported; write it as a function of a module, or "
            'give "module:name" of an object in one'
        )
    if module == "__main__" and setting in IN_OTHER_PROCESSES:
        raise ConfigError(
            f"{setting} = {function!r} is of the program or notebook itself, and is called in another process, which "
            "cannot import that; move it to a module beside it"
        )
    return f"{module}:{name}"


def _sources(task: TaskLike) -> tuple[TaskSource, ...]:
    if isinstance(task, Sequence):
        return tuple(task)
    if not isinstance(task, Section):
        raise ConfigError(
            f"task = {task!r} must be a titan_rl.core.settings.Section, whose fields are its settings: class "
            f"{type(task).__name__}(Section)"
        )
    return (TaskSource(task=task),)


def _is_of_tasks(setting: str) -> bool:
    return setting.startswith(("task.", "tasks."))


def _changed(config: RunConfig, task: TaskLike | None, changes: Mapping[str, object]) -> RunConfig:
    """
    Raises:
        ConfigError: a setting is wrong.
    """
    if task is None and not changes:
        return config
    origins = Origins(())
    tables: dict[str, Any] = {name: getattr(config, name) for name in type(config).model_fields}
    of_tasks = {setting: value for setting, value in changes.items() if _is_of_tasks(setting)}
    tables["tasks"] = with_settings(config.tasks if task is None else _sources(task), of_tasks, origins)
    for setting, value in changes.items():
        if setting in of_tasks:
            continue
        origins.note(setting, ARGUMENTS)
        table, _, field = setting.rpartition(".")
        if not table:
            tables[setting] = value
        elif isinstance(tables.get(table), Section):
            tables[table] = {**tables[table].model_dump(exclude_unset=True), field: value}
        elif isinstance(tables.get(table), dict):
            tables[table][field] = value
        else:
            raise ConfigError(f"{setting} = {value!r}: there is no table {table!r}")
    try:
        changed = RunConfig.model_validate(without_unset(RunConfig, tables))
    except ValidationError as error:
        raise ConfigError(explain(error, RunConfig, origins)) from None
    search_path = SearchPath(changed.pythonpath, origins)
    check_functions(changed, changed.generation, changed.routing, origins)
    modules = [*(type_of(source.task).partition(":")[0] for source in changed.tasks), *named_modules(changed)]
    return changed.model_copy(update={"pythonpath": search_path.needed_for(modules)})

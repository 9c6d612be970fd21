"""Loading of settings from TOML, the command line and Python, and dumping of settings to TOML.

All checks of settings that need no process are made here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import tomli_w
from pydantic import ValidationError

from titan_rl.config.adapters import AdapterRun, load_adapters
from titan_rl.config.concurrency import describe_concurrency
from titan_rl.config.explain import ARGUMENTS, COMMAND_LINE, Origins, explain
from titan_rl.config.functions import SearchPath, check_functions, named_modules
from titan_rl.config.model_folder import (
    check_adapter_start,
    check_chat_template,
    check_model_folder,
    check_training_fit,
    describe_folders,
    find_model_folder,
)
from titan_rl.config.retired import drop_unchanged
from titan_rl.config.run import RunConfig
from titan_rl.config.sections import SFTConfig
from titan_rl.config.serve import check_server_settings
from titan_rl.config.tables import UNSET, give, read_tables, without_unset
from titan_rl.config.task_tables import (
    check_task,
    dump_tasks,
    load_suites,
    load_tasks,
    suite_table,
    type_of,
    with_settings,
)
from titan_rl.config.tasks import TaskSource
from titan_rl.core.calls.imports import name_of
from titan_rl.core.calls.parsing import is_http_url
from titan_rl.core.errors import ConfigError
from titan_rl.core.settings import Section, dotted
from titan_rl.rollout.task import ServingTask, Task
from titan_rl.scheduling.settings import MODES
from titan_rl.training.settings import MADE_BY_SFT


def load_config(
    paths: str | Path | Sequence[str | Path],
    overrides: Sequence[tuple[str, str]] = (),
    *,
    given: Mapping[str, object] | None = None,
    check_files: bool = True,
) -> RunConfig:
    """Read the settings of a run.

    The task and every "module:function" are imported from the current folder, the folders of `pythonpath`, the folder
    of a TOML file, or Python's own search path. `model.path` is searched in the current folder, and then beside the
    TOML file that names it. The config holds the absolute path that was found, so that it means the same in other
    folders.

    Args:
        paths: TOML file or files. Later files override earlier ones: tables are merged, and other values replaced.
        overrides: Dotted settings and their values, which override the files. A value is parsed as TOML if possible,
            and is a string otherwise: `("training.lr", "1e-3")`, `("model.dtype", "bfloat16")`. The value "none", here
            or in a file, unsets an optional setting: `("sampling.seeded", "none")`.
        given: Dotted settings with Python values, which also override the files.
        check_files: Whether to check the model folder and the task's files, too.

    Raises:
        ConfigError: A setting is wrong. The message names each such setting, its value, its origin and the allowed
            values.
        ModelError: The model folder lacks a file that the run needs.

    Example:
        config = load_config("examples/alphabet_sort/cpu.toml", [("training.steps", "5")])
    """
    config, origins = read_config(paths, overrides, given)
    config = _with_teachers(config, origins, check_files=check_files)
    if check_files:
        check_model_folder(config.model, config.generation, origins.folders_for("model.path"))
        check_chat_template(config.model)
        check_training_fit(config)
        check_adapter_start(config, origins.folders_for("training.adapter.start"))
        for table, source in config.tables_of_tasks():
            check_task(source.task, origins, table)
    for table, source in config.tables_of_tasks():
        if isinstance(source.task, ServingTask):
            for name, settings in source.task.server_settings().items():
                check_server_settings(settings, name.replace("task.", f"{table}.", 1), origins)
    return config


def read_config(
    paths: str | Path | Sequence[str | Path],
    overrides: Sequence[tuple[str, str]],
    given: Mapping[str, object] | None = None,
) -> tuple[RunConfig, Origins]:
    """Read a config without checking the files that it names. Return it with the origin of each setting; see
    `load_config`."""
    files = [Path(path) for path in ([paths] if isinstance(paths, str | Path) else paths)]
    tables, origins = read_tables(files, overrides)
    give(tables, given or {}, origins)
    drop_unchanged(tables)
    search_path = SearchPath(tables.get("pythonpath"), origins)
    tasks = load_tasks(tables, origins)
    load_suites(tables, origins)
    load_adapters(tables, origins, RunConfig.model_fields)
    try:
        config = RunConfig.model_validate(without_unset(RunConfig, {**tables, "tasks": tasks}))
    except ValidationError as error:
        raise ConfigError(explain(error, RunConfig, origins)) from None
    check_functions(config, config.generation, config.routing, origins)
    modules = [*(type_of(source.task).partition(":")[0] for source in config.sources), *named_modules(config)]
    config = config.model_copy(update={"pythonpath": search_path.needed_for(modules)})
    config = _with_adapter_folders(config, origins.folders_for("training.adapter.start"))
    folder = find_model_folder(config.model.path, origins.folders_for("model.path"))
    if folder is not None:
        model = config.model.model_copy(update={"path": str(folder)})
        config = config.model_copy(update={"model": model})
    return config, origins


def _with_teachers(config: RunConfig, origins: Origins, *, check_files: bool) -> RunConfig:
    """Copy a config with absolute paths for the folders of its teachers.

    Args:
        check_files: Whether to refuse folders that do not exist.

    Raises:
        ConfigError: A folder does not exist.
    """
    tasks: list[TaskSource] = []
    for source in config.tasks:
        if source.teacher is not None:
            found = _teacher(source.teacher, f"tasks.{source.name}.teacher", origins, check_files=check_files)
            source = source.model_copy(update={"teacher": found})
        tasks.append(source)
    teacher = _teacher(config.training.teacher, "training.teacher", origins, check_files=check_files)
    training = config.training.model_copy(update={"teacher": teacher})
    return config.model_copy(update={"training": training, "tasks": tuple(tasks)})


def _teacher(name: str, key: str, origins: Origins, *, check_files: bool) -> str:
    if name in ("", "self"):
        return name
    if name.startswith(("http://", "https://")):
        if not is_http_url(name):
            raise ConfigError(
                f"{origins.of(key)}: {key} = {name!r} names no host, or a port that does not exist; write http://HOST:PORT"
            )
        return name
    folders = origins.folders_for(key)
    if (folder := find_model_folder(name, folders)) is not None:
        return str(folder)
    if check_files:
        raise ConfigError(
            f"{origins.of(key)}: {key} = {name!r} is no folder {describe_folders(folders)}; name the folder of a "
            'model, a run or a checkpoint, the URL of a server, or "self"'
        )
    return name


def _with_adapter_folders(config: RunConfig, folders: Sequence[Path]) -> RunConfig:
    """Copy a config with absolute paths for the folders of `training.adapter.start`, including those in [[adapters]],
    if they are found."""

    def found(start: str) -> str:
        return str(find_model_folder(start, folders) or start)

    training = config.training
    if training.adapter.start is not None:
        common = training.adapter.model_copy(update={"start": found(training.adapter.start)})
        training = training.model_copy(update={"adapter": common})
    adapters: list[AdapterRun] = []
    for adapter in config.adapters:
        own: dict[str, Any] = adapter.training.get("adapter", {})
        if own.get("start") is not None:
            changed = {**adapter.training, "adapter": {**own, "start": found(own["start"])}}
            adapter = adapter.model_copy(update={"training": changed})
        adapters.append(adapter)
    return config.model_copy(update={"training": training, "adapters": tuple(adapters)})


def dump_config(config: RunConfig, *, with_defaults: bool = True) -> str:
    """Dump the settings as TOML, after comments with the resulting concurrency. `load_config` reads an equal config
    from it.

    Args:
        with_defaults: Whether to include settings that have their defaults.
    """
    presets = [text for text in (config.scheduling.describe_mode(), config.training.describe_algorithm()) if text]
    figures = "".join(f"# {line}\n" for line in [*describe_concurrency(config), *presets])
    tables = config.model_dump(mode="json", exclude_none=True, exclude_defaults=not with_defaults, exclude={"tasks"})
    if not config.adapters:
        tables.pop("adapters", None)
    if suites := [suite_table(suite) for suite in config.validation.suites]:
        tables.setdefault("validation", {})["suites"] = suites
    else:
        tables.get("validation", {}).pop("suites", None)
    if config.scheduling.mode is not None:  # the settings that the mode sets, and those that were given instead
        names = MODES[config.scheduling.mode]
        tables["scheduling"] |= {
            name: UNSET if value is None else value
            for name in names
            if (value := getattr(config.scheduling, name)) is not None or config.scheduling.window is None
        }
    return f"{figures}\n{tomli_w.dumps({**tables, **dump_tasks(config.tasks)})}"


ConfigLike = RunConfig | str | Path | Sequence[str | Path]
"""A config, or the TOML file or files of one."""

IN_OTHER_PROCESSES = ("training.loss", "training.optimizer", "generation.engine", "statedict.transport")
"""Settings that name functions that the process of the trainer or of a generator calls."""

TaskLike = Task | Sequence[TaskSource]
"""One task, or several tasks with their shares."""


def given_config(
    config: ConfigLike,
    *,
    task: TaskLike | None = None,
    functions: Mapping[str, Callable[..., Any] | str | None],
    overrides: Mapping[str, object] | None = None,
    check_files: bool,
) -> RunConfig:
    """Build a config with some of its settings replaced.

    Args:
        task: Task or tasks that replace those of the config.
        functions: Importable functions, or their names, by setting, such as "training.loss".
        overrides: Values of other settings by dotted name, including settings of tasks, as on the command line.
        check_files: Whether to check the model folder and the tasks' files, too.

    Raises:
        ConfigError: A setting is wrong, or other processes could not import a function.
        ModelError: The model folder lacks a file.
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
    """Check the files that a config from TOML names."""
    folders = [Path()]
    folder = find_model_folder(config.model.path, folders)
    if folder is not None:
        config = config.model_copy(update={"model": config.model.model_copy(update={"path": str(folder)})})
    check_model_folder(config.model, config.generation, folders)
    check_chat_template(config.model)
    check_training_fit(config)
    check_adapter_start(config, folders)
    return config


def name_function(setting: str, function: Callable[..., Any]) -> str:
    """Return the name "module:function" of a function.

    Raises:
        ConfigError: The function cannot be imported by this name.
    """
    name = name_of(function)
    if name is None:
        raise ConfigError(
            f"{setting} = {function!r} has no name by which it can be imported; write it as a function of a module, or "
            'give "module:name" of an object in one'
        )
    if name.startswith("__main__:") and setting in IN_OTHER_PROCESSES:
        raise ConfigError(
            f"{setting} = {function!r} is defined in the program or notebook itself, and another process that calls "
            "it cannot import that; move it to a module"
        )
    return name


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
    """Copy a config with changed settings.

    Raises:
        ConfigError: A setting is wrong.
    """
    if task is None and not changes:
        return config
    origins = Origins(())
    tables: dict[str, Any] = {name: getattr(config, name) for name in type(config).model_fields}
    of_tasks = {setting: value for setting, value in changes.items() if _is_of_tasks(setting)}
    of_adapters = {setting: value for setting, value in changes.items() if setting.startswith("adapters.")}
    if of_adapters:
        tables["adapters"] = {each.name: each.model_dump(exclude={"name"}) for each in config.adapters}
        give(tables, of_adapters, origins)
        load_adapters(tables, origins, RunConfig.model_fields)
    tables["tasks"] = with_settings(config.tasks if task is None else _sources(task), of_tasks, origins)
    for setting, value in changes.items():
        if setting in of_tasks or setting in of_adapters:
            continue
        origins.note(setting, ARGUMENTS)
        *path, field = setting.split(".")
        table, section = tables, config
        for name in path:
            section = getattr(section, name, None)
            inner = table.get(name, section)  # the defaults if the table is not set
            if isinstance(inner, Section):
                inner = inner.model_dump(exclude_unset=True)
            if not isinstance(inner, dict):
                raise ConfigError(f"{setting} = {value!r}: there is no table {name!r}")
            table[name] = dict(cast("dict[str, Any]", inner))
            table = table[name]
        table[field] = value
    try:
        changed = RunConfig.model_validate(without_unset(RunConfig, tables))
    except ValidationError as error:
        raise ConfigError(explain(error, RunConfig, origins)) from None
    search_path = SearchPath(changed.pythonpath, origins)
    check_functions(changed, changed.generation, changed.routing, origins)
    modules = [*(type_of(source.task).partition(":")[0] for source in changed.tasks), *named_modules(changed)]
    return changed.model_copy(update={"pythonpath": search_path.needed_for(modules)})


def load_sft_config(paths: str | Path | Sequence[str | Path], overrides: Sequence[tuple[str, str]] = ()) -> RunConfig:
    """Load the config of a supervised run, which writes `model.path`, and whose `sft.start` must exist if it is set. In
    the result, `sft.start`, `sft.data` and `sft.out` are absolute paths, and `sft.out` is set in any case. See
    `load_config`.

    Raises:
        ConfigError: A setting is wrong. The message names each such setting, its value, its origin and what is allowed.
        ModelError: The folder of the model to start from lacks a file.
    """
    config, origins = read_config(paths, overrides)
    if config.adapters:
        raise ConfigError(f"{origins.of('adapters')}: titan-rl sft trains one model; leave [[adapters]] out")
    sft = config.sft.model_copy(
        update={
            "start": _start(config, origins),
            "data": _data(config.sft, origins),
            "out": str(_out(config, origins)),
        }
    )
    _check_out(sft)
    if sft.start:
        model = config.model.model_copy(update={"path": sft.start})
        check_model_folder(model, config.generation, [Path()])
        check_chat_template(model)
        check_training_fit(config.model_copy(update={"model": model}))
    for table, source in config.tables_of_tasks():
        check_task(source.task, origins, table)
    return config.model_copy(update={"sft": sft})


def _start(config: RunConfig, origins: Origins) -> str:
    start = config.sft.start
    if not start:
        return ""
    folders = origins.folders_for("sft.start")
    if (folder := find_model_folder(start, folders)) is None:
        raise ConfigError(
            f"{origins.of('sft.start')}: sft.start = {start!r} is not a folder {describe_folders(folders)}; leave it "
            "out to create a tiny model, or name a Hugging Face folder"
        )
    return str(folder)


def _data(sft: SFTConfig, origins: Origins) -> str:
    if not sft.data:
        return ""
    folders = origins.folders_for("sft.data")
    found = next((path for folder in folders if (path := folder / os.path.expanduser(sft.data)).exists()), None)
    if found is None:
        raise ConfigError(
            f"{origins.of('sft.data')}: sft.data = {sft.data!r} does not exist {describe_folders(folders)}; name a "
            "file of chats in JSON lines, or the folder of a run"
        )
    if found.is_dir() and not (found / "rollouts.jsonl").is_file():
        raise ConfigError(
            f"{origins.of('sft.data')}: sft.data = {sft.data!r} is a folder without rollouts.jsonl; name that of a run"
        )
    return str(found.resolve())


def _out(config: RunConfig, origins: Origins) -> Path:
    """Resolve the output folder. A relative path that does not exist yet is relative to the file that sets it, or to
    the current folder if the command line sets it."""
    key = "sft.out" if config.sft.out else "model.path"
    path = config.sft.out or config.model.path
    folders = origins.folders_for(key)
    if (folder := find_model_folder(path, folders)) is not None:
        return folder
    return (folders[0 if origins.of(key) == COMMAND_LINE else 1] / os.path.expanduser(path)).absolute()


def _check_out(sft: SFTConfig) -> None:
    out = Path(sft.out)
    if out.exists() and not (out / MADE_BY_SFT).is_file():
        raise ConfigError(
            f"{sft.out} exists, and was not created by titan-rl sft, so it is not replaced. To train that model, set "
            "sft.start to it and sft.out to another folder; to create a tiny model, set model.path to another folder"
        )
    if sft.out == sft.start:
        raise ConfigError(f"sft.start = {sft.start!r} would be replaced by the trained model; set sft.out")

"""Loading of settings from TOML, the command line and Python, and dumping of settings to TOML.

All checks of settings that need no process are made here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from titan_rl.config.concurrency import describe_concurrency
from titan_rl.config.function_names import SearchPath, check_functions, named_modules
from titan_rl.config.lora_experiments import AdapterRun, load_adapters
from titan_rl.config.model_folder import (
    check_adapter_start,
    check_chat_template,
    check_model_folder,
    check_training_fit,
    describe_folders,
    find_model_folder,
)
from titan_rl.config.run import RunConfig
from titan_rl.config.sections import SFTConfig
from titan_rl.config.serve import check_server_settings
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
from titan_rl.config.unchecked_tables import UNSET, give, read_tables, validated
from titan_rl.config.validation_errors import COMMAND_LINE, Origins
from titan_rl.core.calls.imports import name_of
from titan_rl.core.calls.parsing import is_http_url
from titan_rl.core.errors import ConfigError
from titan_rl.core.settings import Section, dotted, with_value
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
    of a TOML file, or Python's own search path. `model.path` is searched in the current folder, and then next to the
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
        _check_folders(config, origins)
        _check_tasks(config, origins)
    for table, source in config.tables_of_tasks():
        if isinstance(source.task, ServingTask):
            for name, settings in source.task.server_settings().items():
                check_server_settings(settings, name.replace("task.", f"{table}.", 1), origins)
    return config


def read_config(
    paths: str | Path | Sequence[str | Path],
    overrides: Sequence[tuple[str, str]],
    given: Mapping[str, object] | None = None,
    *,
    needs_task: bool = True,
) -> tuple[RunConfig, Origins]:
    """Read a config without checking the files that it names. Return it with the origin of each setting; see
    `load_config` and `load_tasks`."""
    files = [Path(path) for path in ([paths] if isinstance(paths, str | Path) else paths)]
    tables, origins = read_tables(files, overrides)
    give(tables, given or {}, origins)
    search_path = SearchPath(tables.get("pythonpath"), origins)
    tasks = load_tasks(tables, origins, needs_task=needs_task)
    load_suites(tables, origins)
    load_adapters(tables, origins, RunConfig.model_fields)
    return _with_folders(_checked({**tables, "tasks": tasks}, search_path, origins), origins), origins


def _checked(tables: Mapping[str, Any], search_path: SearchPath, origins: Origins) -> RunConfig:
    """Validate tables whose tasks, suites and adapters are loaded, and import the functions that they name."""
    config = validated(RunConfig, tables, origins)
    check_functions(config, config.generation, config.routing, origins)
    modules = [*(type_of(source.task).partition(":")[0] for source in config.sources), *named_modules(config)]
    return with_value(config, "pythonpath", search_path.needed_for(modules))


def _with_folders(config: RunConfig, origins: Origins) -> RunConfig:
    """Copy a config with absolute paths for `model.path` and for each `training.adapter.start`, if they are found."""
    model, start = "model.path", "training.adapter.start"

    def found(path: str, key: str) -> str:
        return str(find_model_folder(path, origins.folders_for(key)) or path)

    config = with_value(config, model, found(config.model.path, model))
    if config.training.adapter.start is not None:
        config = with_value(config, start, found(config.training.adapter.start, start))
    adapters: list[AdapterRun] = []
    for adapter in config.adapters:
        own: dict[str, Any] = adapter.training.get("adapter", {})
        if own.get("start") is not None:
            own = {**own, "start": found(own["start"], start)}
            adapter = with_value(adapter, "training", {**adapter.training, "adapter": own})
        adapters.append(adapter)
    return with_value(config, "adapters", tuple(adapters))


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
            source = with_value(source, "teacher", found)
        tasks.append(source)
    teacher = _teacher(config.training.teacher, "training.teacher", origins, check_files=check_files)
    return with_value(with_value(config, "training.teacher", teacher), "tasks", tuple(tasks))


def _teacher(name: str, key: str, origins: Origins, *, check_files: bool) -> str:
    if name in ("", "self"):
        return name
    if name.startswith(("http://", "https://")):
        if not is_http_url(name):
            raise ConfigError(
                f"{origins.of(key)}: {key} = {name!r} has no host or an invalid port; write http://HOST:PORT"
            )
        return name
    folders = origins.folders_for(key)
    if (folder := find_model_folder(name, folders)) is not None:
        return str(folder)
    if check_files:
        raise ConfigError(
            f"{origins.of(key)}: {key} = {name!r} is not a folder {describe_folders(folders)}; name the folder of a "
            'model, a run or a checkpoint, the URL of a server, or "self"'
        )
    return name


def _check_folders(config: RunConfig, origins: Origins) -> None:
    """Check the folders of the model and of adapters to start from."""
    check_model_folder(config.model, config.generation, origins.folders_for("model.path"))
    check_chat_template(config.model)
    check_training_fit(config)
    check_adapter_start(config, origins.folders_for("training.adapter.start"))


def _check_tasks(config: RunConfig, origins: Origins) -> None:
    for table, source in config.tables_of_tasks():
        check_task(source.task, origins, table)


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
    origins = Origins(())
    if not isinstance(config, RunConfig):
        if task is None:
            return load_config(config, given=changes, check_files=check_files)
        of_files = {key: value for key, value in changes.items() if not _is_of_tasks(key)}
        config = load_config(config, given=of_files, check_files=check_files)
        changes = {key: value for key, value in changes.items() if key not in of_files}
        check_files = False
    config = _changed(config, task, changes, origins)
    _check_tasks(config, origins)
    if check_files:
        config = _with_teachers(_with_folders(config, origins), origins, check_files=True)
        _check_folders(config, origins)
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


def _changed(config: RunConfig, task: TaskLike | None, changes: Mapping[str, object], origins: Origins) -> RunConfig:
    """Copy a config with changed settings, and note their origin.

    Raises:
        ConfigError: A setting is wrong.
    """
    if task is None and not changes:
        return config
    of_tasks = {setting: value for setting, value in changes.items() if _is_of_tasks(setting)}
    others = {setting: value for setting, value in changes.items() if setting not in of_tasks}
    tables: dict[str, Any] = {name: getattr(config, name) for name in type(config).model_fields}
    if any(setting.startswith("adapters.") for setting in others):
        tables["adapters"] = {each.name: each.model_dump(exclude={"name"}) for each in config.adapters}
    for name in {setting.partition(".")[0] for setting in others}:
        tables[name] = _given_settings(tables.get(name, {}))
    give(tables, others, origins)
    if isinstance(tables["adapters"], dict):
        load_adapters(tables, origins, RunConfig.model_fields)
    tables["tasks"] = with_settings(config.tasks if task is None else _sources(task), of_tasks, origins)
    return _checked(tables, SearchPath(tables["pythonpath"], origins), origins)


def _given_settings(value: Any) -> Any:
    """Convert a table to a dictionary of the settings that were given. Other values are returned unchanged."""
    if not isinstance(value, Section):
        return value
    return {name: _given_settings(getattr(value, name)) for name in value.model_fields_set}


def load_sft_config(paths: str | Path | Sequence[str | Path], overrides: Sequence[tuple[str, str]] = ()) -> RunConfig:
    """Load the config of a supervised run, which writes `model.path`, and whose `sft.start` must exist if it is set. In
    the result, `sft.start`, `sft.data` and `sft.out` are absolute paths, and `sft.out` is set in any case. See
    `load_config`.

    Raises:
        ConfigError: A setting is wrong. The message names each such setting, its value, its origin and what is allowed.
        ModelError: The folder of the model to start from lacks a file.
    """
    config, origins = read_config(paths, overrides, needs_task=False)
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
        model = with_value(config.model, "path", sft.start)
        check_model_folder(model, config.generation, [Path()])
        check_chat_template(model)
        check_training_fit(with_value(config, "model", model))
    _check_tasks(config, origins)
    return with_value(config, "sft", sft)


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
            f"{origins.of('sft.data')}: sft.data = {sft.data!r} is a folder without rollouts.jsonl; name the "
            "folder of a run"
        )
    return str(found.resolve())


def _out(config: RunConfig, origins: Origins) -> Path:
    """Resolve the output folder. A relative path that does not exist yet is relative to the file that sets it, or to
    the current folder if the command line sets it. Links are resolved, because the folder is renamed to that path."""
    key = "sft.out" if config.sft.out else "model.path"
    path = config.sft.out or config.model.path
    folders = origins.folders_for(key)
    if (folder := find_model_folder(path, folders)) is not None:
        return folder
    above = folders[0 if origins.of(key) == COMMAND_LINE else 1]
    return Path(os.path.realpath(above / os.path.expanduser(path)))


def _check_out(sft: SFTConfig) -> None:
    out = Path(sft.out)
    if out.exists() and not (out / MADE_BY_SFT).is_file():
        raise ConfigError(
            f"{sft.out} exists, and was not created by titan-rl sft, so it is not replaced. To train that model, set "
            "sft.start to it and sft.out to another folder; to create a tiny model, set model.path to another folder"
        )
    if sft.out == sft.start:
        raise ConfigError(f"sft.start = {sft.start!r} would be replaced by the trained model; set sft.out")

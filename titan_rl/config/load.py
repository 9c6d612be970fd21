"""Read a run's settings from TOML and the command line, and write them back.

Everything that can be known to be wrong is found here, before any process starts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import tomli_w
from pydantic import ValidationError

from titan_rl.config.class_kinds import type_of
from titan_rl.config.concurrency import describe_concurrency
from titan_rl.config.dump_tasks import dump_tasks, suite_table
from titan_rl.config.explain import Origins, explain
from titan_rl.config.functions import check_functions, named_modules
from titan_rl.config.load_task import check_task, load_suites, load_tasks
from titan_rl.config.model_folder import check_chat_template, check_model_folder, check_training_fit, find_model_folder
from titan_rl.config.run import RunConfig
from titan_rl.config.search_path import SearchPath
from titan_rl.config.tables import give, read_tables
from titan_rl.config.unset import without_unset
from titan_rl.core.errors import ConfigError


def load_config(
    paths: str | Path | Sequence[str | Path],
    overrides: Sequence[tuple[str, str]] = (),
    *,
    given: Mapping[str, object] | None = None,
    check_files: bool = True,
) -> RunConfig:
    """Read the settings of a run.

    The task and every "module:function" are imported, from the current folder, from beside a TOML file, or from where
    Python finds modules anyway. `model.path` is looked for in the current folder, then beside the TOML file that names
    it. The config holds what was found, so that it means the same in other folders.

    Args:
        paths: a TOML file, or several, each of which replaces what those before it say: tables are merged, other
            values are replaced.
        overrides: dotted settings and their values, each replacing what the files say. A value is read as TOML where
            it is TOML, else as a string: `("training.lr", "1e-3")`, `("model.dtype", "bfloat16")`. An optional setting
            that is "none", here or in a file, is unset: `("sampling.seeded", "none")`.
        given: as `overrides`, with values of Python.
        check_files: look into the model folder and the task's files too.

    Raises:
        ConfigError: names each wrong setting, its value, where it came from and what is allowed.
        ModelError: the model folder lacks a file that the run needs.

    Example:
        config = load_config("examples/alphabet_sort/cpu.toml", [("training.steps", "5")])
    """
    config, origins = read_config(paths, overrides, given)
    if check_files:
        check_model_folder(config.model, config.generation, origins.folders_for("model.path"))
        check_chat_template(config.model)
        check_training_fit(config)
        for table, source in config.tables_of_tasks():
            check_task(source.task, origins, table)
    return config


def read_config(
    paths: str | Path | Sequence[str | Path],
    overrides: Sequence[tuple[str, str]],
    given: Mapping[str, object] | None = None,
) -> tuple[RunConfig, Origins]:
    """As `load_config`, without a look into files, and where each setting came from."""
    files = [Path(path) for path in ([paths] if isinstance(paths, str | Path) else paths)]
    tables, origins = read_tables(files, overrides)
    give(tables, given or {}, origins)
    search_path = SearchPath(tables.get("pythonpath"), origins)
    tasks = load_tasks(tables, origins)
    load_suites(tables, origins)
    try:
        config = RunConfig.model_validate(without_unset(RunConfig, {**tables, "tasks": tasks}))
    except ValidationError as error:
        raise ConfigError(explain(error, RunConfig, origins)) from None
    check_functions(config, config.generation, config.routing, origins)
    modules = [*(type_of(source.task).partition(":")[0] for source in config.sources), *named_modules(config)]
    config = config.model_copy(update={"pythonpath": search_path.needed_for(modules)})
    folder = find_model_folder(config.model.path, origins.folders_for("model.path"))
    if folder is not None:
        model = config.model.model_copy(update={"path": str(folder)})
        config = config.model_copy(update={"model": model})
    return config, origins


def dump_config(config: RunConfig, *, with_defaults: bool = True) -> str:
    """The settings as TOML, under what they come to. `load_config` of it gives an equal config.

    Args:
        with_defaults: also those that are what they are by default.
    """
    figures = "".join(f"# {line}\n" for line in describe_concurrency(config))
    tables = config.model_dump(mode="json", exclude_none=True, exclude_defaults=not with_defaults, exclude={"tasks"})
    if suites := [suite_table(suite) for suite in config.validation.suites]:
        tables.setdefault("validation", {})["suites"] = suites
    else:
        tables.get("validation", {}).pop("suites", None)
    return f"{figures}\n{tomli_w.dumps({**tables, **dump_tasks(config.tasks)})}"

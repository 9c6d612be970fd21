"""Read a run's settings from TOML and the command line, and write them back.

Everything that can be known to be wrong is found here, before any process starts.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import tomli_w
from pydantic import ValidationError

from titan_rl.config.concurrency import describe_concurrency
from titan_rl.config.explain import Origins, explain
from titan_rl.config.functions import check_functions
from titan_rl.config.load_task import check_task, load_task, task_type
from titan_rl.config.model_folder import check_chat_template, check_model_folder, check_training_fit, find_model_folder
from titan_rl.config.run import RunConfig
from titan_rl.errors import ConfigError

Tables = dict[str, Any]


def load_config(path: str | Path, overrides: Sequence[tuple[str, str]] = (), *, check_files: bool = True) -> RunConfig:
    """Read the settings of a run.

    The task and every "module:function" are imported. `model.path` is looked for in the current directory, then beside
    the TOML file; the config holds what was found.

    Args:
        path: a TOML file.
        overrides: dotted settings and their values, each replacing what the file says. A value is read as TOML where
            it is TOML, else as a string: `("training.lr", "1e-3")`, `("model.dtype", "bfloat16")`.
        check_files: look into the model folder and the task's files too.

    Raises:
        ConfigError: names each wrong setting, its value, where it came from and what is allowed.
        ModelError: the model folder lacks a file that the run needs.

    Example:
        config = load_config("examples/alphabet_sort/cpu.toml", [("training.steps", "5")])
    """
    path = Path(path)
    tables, origins = read_toml(path), Origins(str(path))
    override(tables, overrides, origins)
    task = load_task(tables.pop("task", None), origins)
    try:
        config = RunConfig.model_validate({**tables, "task": task})
    except ValidationError as error:
        raise ConfigError(explain(error, RunConfig, origins)) from None
    check_functions(config, config.generation, origins)
    folder = find_model_folder(config.model.path, beside=path.parent)
    if folder is not None:
        model = config.model.model_copy(update={"path": str(folder)})
        config = config.model_copy(update={"model": model})
    if check_files:
        check_model_folder(config.model, config.generation, beside=path.parent)
        check_chat_template(config.model)
        check_training_fit(config)
        check_task(config.task, origins)
    return config


def dump_config(config: RunConfig) -> str:
    """The settings as TOML, defaults included, under what they come to. `load_config` of it gives an equal config."""
    figures = "".join(f"# {line}\n" for line in describe_concurrency(config))
    tables = config.model_dump(mode="json", exclude_none=True)
    tables["task"] = {"type": task_type(config.task), **tables["task"]}
    return f"{figures}\n{tomli_w.dumps(tables)}"


def read_toml(path: Path) -> Tables:
    """The tables of a file.

    Raises:
        ConfigError: there is none, or it is no TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        there = sorted(str(other) for other in path.parent.glob("*.toml"))
        hint = f"; that folder has {', '.join(there)}" if there else ""
        raise ConfigError(f"{path}: no such file{hint}") from None
    except IsADirectoryError:
        there = sorted(str(other) for other in path.glob("*.toml"))
        raise ConfigError(f"{path} is a folder; name a TOML file{f' in it: {there[0]}' if there else ''}") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; name a TOML file that you may read") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None


def override(tables: Tables, overrides: Sequence[tuple[str, str]], origins: Origins) -> None:
    """Set dotted settings in place, and note where they came from.

    Raises:
        ConfigError: one is below a setting that is no table.
    """
    for key, text in overrides:
        _override(tables, key, text)
        origins.note_override(key)


def _override(tables: Tables, key: str, text: str) -> None:
    """Set the dotted `key` in place, making the tables on its way."""
    *parents, name = key.split(".")
    table = tables
    for depth, parent in enumerate(parents, start=1):
        child = table.setdefault(parent, {})
        if not isinstance(child, dict):
            raise ConfigError(f"command line: --{key}: {'.'.join(parents[:depth])} is a setting, not a table")
        table = cast("Tables", child)
    table[name] = _parse_value(text)


def _parse_value(text: str) -> Any:
    """`text` as a TOML value, and as the string it is where it is none: `3`, `[0.9, 0.99]`, `cosine`."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    # A line break in `text` could bring further keys; then it is no single value.
    return parsed["value"] if len(parsed) == 1 else text

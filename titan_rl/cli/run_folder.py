"""The folder of an earlier run, as it is named on the command line."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from titan_rl.config.changes import check_options, is_resumable
from titan_rl.config.functions import recorded_modules
from titan_rl.config.run import RunConfig
from titan_rl.core.errors import ConfigError
from titan_rl.run.directory import check_files
from titan_rl.run.terminal.standard_streams import tell

CONFIG = "config.toml"
USUAL = Path("runs/latest")


def find_run(name: str, option: str = "--resume") -> Path:
    """The absolute folder of the run that an option names.

    Raises:
        ConfigError: no run is there. It says what is, and where a run is as far as that is to be seen.
    """
    path = Path(name)
    if _is_run(path):
        return path.resolve()
    if os.path.isdir(path):
        problem, near = f"the folder has no {CONFIG}", _newest_in(path)
    elif os.path.exists(path):
        problem, near = "it is a file", path.parent
    else:
        problem, near = "there is no such folder", USUAL
    hint = f", as {near}" if near is not None and _is_run(near) else ""
    raise ConfigError(f"{option} {name}: no run is there: {problem}; name the folder of a run{hint}")


def load_resumed(
    load: Callable[[Path, Sequence[tuple[str, str]]], RunConfig], run: Path, overrides: Sequence[tuple[str, str]]
) -> RunConfig:
    """The settings with which a run goes on.

    Args:
        load: reads a file and the options that replace what it says.
        run: of `find_run`.

    Raises:
        ConfigError: a setting is wrong, an option changes one that has to stay, or the folder holds links.
    """
    check_files(run)
    tell_imports(run / CONFIG)
    config = load(run / CONFIG, overrides)
    allowed = [(key, value) for key, value in overrides if is_resumable(key)]
    if len(allowed) < len(overrides):
        check_options(config, load(run / CONFIG, allowed))
    return config


def tell_imports(config: Path) -> None:
    """Say which code the settings of a run have imported, and from which of the folders that they name, before it is.

    Args:
        config: a run's `config.toml`. Whoever wrote it decides what is imported.
    """
    found = recorded_modules(config)
    if found:
        what = ", ".join(f"{name} from {folder}" for name, folder in found.items())
        tell(f"titan-rl: {config} imports {what}")


def _is_run(folder: Path) -> bool:
    return os.path.isfile(folder / CONFIG)


def _newest_in(folder: Path) -> Path | None:
    """Runs are named by their times, and the newest is linked to."""
    if _is_run(folder / "latest"):
        return folder / "latest"
    return max((config.parent for config in folder.glob(f"*/{CONFIG}")), default=None)

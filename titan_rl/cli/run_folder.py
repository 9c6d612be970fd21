"""The folder of an earlier run, as it is named on the command line."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from titan_rl.config.changes import check_options, is_resumable
from titan_rl.config.run import RunConfig
from titan_rl.errors import ConfigError

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
        ConfigError: a setting is wrong, or an option changes one that has to stay.
    """
    config = load(run / CONFIG, overrides)
    allowed = [(key, value) for key, value in overrides if is_resumable(key)]
    if len(allowed) < len(overrides):
        check_options(config, load(run / CONFIG, allowed))
    return config


def _is_run(folder: Path) -> bool:
    return os.path.isfile(folder / CONFIG)


def _newest_in(folder: Path) -> Path | None:
    """Runs are named by their times, and the newest is linked to."""
    if _is_run(folder / "latest"):
        return folder / "latest"
    return max((config.parent for config in folder.glob(f"*/{CONFIG}")), default=None)

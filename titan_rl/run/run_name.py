"""What tells one run from another: the end of its folder's name."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from titan_rl.config.run import RunConfig

LONGEST = 80
SAYS_NOTHING = ("run_dir", "share_run_dir", "name", "logging.", "pythonpath", "hosts.")
"""Settings, or beginnings of their names, that are no difference between two runs."""


def run_name(config: RunConfig, tomls: Sequence[Path] = (), overrides: Sequence[tuple[str, str]] = ()) -> str:
    """The config's own name; else the task, what further files are called, and what the command line sets.

    Example: `AlphabetSort` from `cpu.toml` and `long.toml` with `--training.lr 1e-3` is "alphabet-sort-long-lr=1e-3".

    Returns:
        part of a file's name: letters, digits and `-_.+=`, 80 at most.
    """
    if config.name:
        return config.name
    settings = {key: value for key, value in overrides if not key.startswith(SAYS_NOTHING)}
    parts = [
        "-".join(source.name.replace("_", "-") for source in config.tasks),
        *(toml.stem for toml in tomls[1:]),
        *(f"{_plain(key.rpartition('.')[2])}={_plain(Path(value).name)}" for key, value in settings.items()),
    ]
    plain = map(_plain, parts)
    name = next(plain)[:LONGEST]
    for part in filter(None, plain):
        if len(name) + 1 + len(part) <= LONGEST:
            name = f"{name}-{part}"
    return name or "run"


def _plain(text: str) -> str:
    return re.sub(r"[^\w.+=-]+", "_", text, flags=re.ASCII).strip("_")

"""Folders of this machine for a host that shares no file system with it. Standard library only."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

from titan_rl.core.errors import ConfigError

CHUNK = 4 << 20
MOST_CODE = 256 << 20  # bytes of one folder of modules
GIT_S = 30.0  # where git takes longer, on a network's file system, files are found without it
LEFT_OUT = ("__pycache__", "node_modules", "runs")

Chunk = tuple[str, bytes]
"""(file below the folder, bytes behind those before)."""


def chunks_of(folder: Path, files: list[Path]) -> Iterator[Chunk]:
    """The contents of files, a piece at a time; an empty one has one piece."""
    for path in files:
        name = str(path.relative_to(folder))
        with path.open("rb") as file:
            yield name, file.read(CHUNK)
            while data := file.read(CHUNK):
                yield name, data


def model_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def code_files(folder: Path) -> list[Path]:
    """What git has of a folder, or would take into it; where there is no git all but what is hidden, environments and
    runs.

    Raises:
        ConfigError: that is too much for code.
    """
    files = _known_to_git(folder)
    if files is None:
        files = list(_walk(folder))
    size = sum(path.stat().st_size for path in files)
    if size > MOST_CODE:
        raise ConfigError(
            f"hosts.sync: {folder}, of `pythonpath`, has {size >> 20} MiB, and code is at most {MOST_CODE >> 20}; set "
            "`pythonpath` to a folder of modules alone"
        )
    return sorted(files)


def _known_to_git(folder: Path) -> list[Path] | None:
    command = ["git", "-C", str(folder), "ls-files", "-z", "--cached", "--others", "--exclude-standard", "."]
    try:
        listed = subprocess.run(command, capture_output=True, check=True, timeout=GIT_S).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    found = [folder / os.fsdecode(name) for name in listed.split(b"\0") if name]
    return [path for path in found if path.is_file()]


def _walk(folder: Path) -> Iterator[Path]:
    for place, folders, names in os.walk(folder):
        here = Path(place)
        folders[:] = [
            name
            for name in folders
            if not name.startswith(".") and name not in LEFT_OUT and not (here / name / "pyvenv.cfg").exists()
        ]
        yield from (here / name for name in names if not name.startswith(".") and (here / name).is_file())

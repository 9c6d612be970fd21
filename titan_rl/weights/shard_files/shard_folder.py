"""Where the files of shards live: each writer's in a folder `titan_rl-weights-<run_id>-<pid>-<random>`."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from titan_rl.weights.shard_files.owned_folder import OwnedFolder, clean_dead_folders

PREFIX = "titan_rl-weights-"


def shard_root() -> Path:
    """/dev/shm, or the temporary folder where a system has none."""
    shm = Path("/dev/shm")
    return shm if os.access(shm, os.W_OK) else Path(tempfile.gettempdir())


def shard_folder(run_id: str, root: Path | None = None) -> OwnedFolder:
    """A new folder for one writer's shards; the names are for people who look.

    Raises:
        OSError: it cannot be made.
    """
    return OwnedFolder(f"{PREFIX}{run_id}-{os.getpid()}-", root or shard_root())


def shard_folders(run_id: str, root: Path | None = None) -> list[Path]:
    """Those that there are of a run."""
    return list((root or shard_root()).glob(f"{PREFIX}{run_id}-*"))


def clean_dead_shards(root: Path | None = None) -> list[Path]:
    """Remove the folders of dead writers, and return them. Readers with a shard mapped keep reading."""
    return clean_dead_folders(PREFIX, root or shard_root())

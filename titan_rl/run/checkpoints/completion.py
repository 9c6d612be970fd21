"""What makes a checkpoint of whatever a trainer has saved: where its run stood, and checksums."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from titan_rl.run.journal.run_state import FILE
from titan_rl.training.state import checksums
from titan_rl.training.state.checkpoint import list_checkpoints, step_directory, step_of, unwritten


def is_complete(root: Path, version: int) -> bool:
    """Whether the trainer has written these itself."""
    folder = _folder(root, version)
    return (folder / FILE).is_file() and (folder / checksums.NAME).is_file()


def complete(root: Path, version: int, run_state: Mapping[str, Any]) -> None:
    """Write what is missing. A trainer that has nothing to save has written no folder either.

    Args:
        root: the folder of checkpoints.
        run_state: as the trainer was given it.

    Raises:
        NoSpaceError: the disk is full.
        CheckpointError: it could not be written for another reason.
    """
    folder = _folder(root, version)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / FILE).is_file():
            (folder / FILE).write_text(json.dumps(run_state))
        if not (folder / checksums.NAME).is_file():
            checksums.write_checksums_of(folder)
    except OSError as error:
        raise unwritten(folder, error) from error


def _folder(root: Path, version: int) -> Path:
    """`step-4` is the checkpoint of version 4, too."""
    found = (path for path in list_checkpoints(root) if step_of(path) == version)
    return next(found, step_directory(root, version))

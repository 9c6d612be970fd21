"""The files of a journal: `step-000040.journal` of the checkpoint of version 40, and as it grows
`step-000040.1.journal` and so on, so that none is larger than a copy or a damaged block should have to do with."""

from __future__ import annotations

import os
import re
from pathlib import Path

from titan_rl.core.errors import CheckpointError

SEGMENT_BYTES = 1 << 28

_NAME = re.compile(r"step-(\d+)(?:\.(\d+))?\.journal")


def segment_name(version: int, part: int = 0) -> str:
    return f"step-{version:06d}.{part}.journal" if part else f"step-{version:06d}.journal"


def version_of(segment: Path) -> int:
    """The version of the checkpoint that it goes on from."""
    return _numbers(segment)[0]


def part_of(segment: Path) -> int:
    """How many are before it of the same checkpoint."""
    return _numbers(segment)[1]


def list_segments(folder: Path) -> list[Path]:
    """The oldest first. Other files of the folder are no concern of a journal.

    Raises:
        CheckpointError: the folder is there and cannot be read.
    """
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(
            f"{folder} cannot be read: {error.strerror}; it should be the folder of the journal. Mend it, or move it "
            "away to go on from the checkpoint alone"
        ) from error
    return sorted((folder / name for name in names if _NAME.fullmatch(name)), key=_numbers)


def needless(segments: list[Path], version: int) -> list[Path]:
    """Those that no checkpoint from `version` on begins with or goes on to."""
    begins = max((version_of(path) for path in segments if version_of(path) <= version), default=0)
    return [path for path in segments if version_of(path) < begins]


def _numbers(segment: Path) -> tuple[int, int]:
    found = _NAME.fullmatch(segment.name)
    assert found is not None, f"{segment} is no segment"
    return int(found[1]), int(found[2] or 0)

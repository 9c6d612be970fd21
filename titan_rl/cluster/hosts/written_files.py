"""What the processes of a host write, as it comes to be there. Standard library only."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

MOST_BYTES = 4 << 20  # of what is sent at once

Had = Mapping[str, tuple[int, int]]
"""What was sent before, by the names of files below the run's folder: which file had the name, and how many bytes."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What is behind that which was sent before.

    Args:
        name: of a file below the run's folder.
        file: which of that name: a trace that grows too large is replaced by a shorter one.
        begin: bytes before it in that file; 0 where it is another than before.
    """

    name: str
    file: int
    begin: int
    data: bytes


def new_pieces(folder: Path, had: Had, most_bytes: int = MOST_BYTES) -> list[Piece]:
    """What is written in the logs and traces of the run's folder on this host behind what was sent. A file that cannot
    be read is left for later."""
    pieces: list[Piece] = []
    for path in sorted([*folder.glob("logs/*"), *folder.glob("trace/*.jsonl")]):
        name = str(path.relative_to(folder))
        with contextlib.suppress(OSError):
            piece = _piece_of(path, name, had.get(name, (0, 0)), most_bytes)
            if piece is not None:
                pieces.append(piece)
                most_bytes -= len(piece.data)
    return pieces


def _piece_of(path: Path, name: str, had: tuple[int, int], most_bytes: int) -> Piece | None:
    """
    Raises:
        OSError: it is gone, or no file.
    """
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        known, begin = had
        if known != status.st_ino or begin > status.st_size:
            begin = 0
        if not most_bytes or begin == status.st_size:
            return None
        file.seek(begin)
        return Piece(name, status.st_ino, begin, file.read(most_bytes))

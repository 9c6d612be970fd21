"""A file of trace events that is only appended to, and kept below a size."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

FINE = b'{"cat":"fine'
"""What lines of spans within a rollout begin with: there are many, and the oldest of them go first."""
NAMES = b'{"ph":"M"'
"""What lines begin with that name a process or a lane: they stay."""


class TraceFile:
    """Lines of JSON, whole ones alone.

    Args:
        most_bytes: of the file. Where it grows beyond, the older half of the fine spans is left out, and of the others
            only as much as has to be.
    """

    def __init__(self, path: Path, most_bytes: int) -> None:
        self._path = path
        self._most_bytes = most_bytes
        self._file: BinaryIO | None = None

    def append(self, lines: Iterable[bytes]) -> None:
        """
        Raises:
            OSError: they could not be written. The file is as it was before.
        """
        data = b"".join(lines)
        file = self._open()
        size = os.fstat(file.fileno()).st_size
        if file.write(data) != len(data):
            file.truncate(size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
        if size + len(data) > self._most_bytes:
            self._shrink()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> BinaryIO:
        if self._file is None:
            self._file = self._path.open("ab", buffering=0)
            self._end_last_line(self._file)
        return self._file

    def _end_last_line(self, file: BinaryIO) -> None:
        """A killed process may have left a part of a line."""
        if size := os.fstat(file.fileno()).st_size:
            with self._path.open("rb") as old:
                old.seek(size - 1)
                if old.read() != b"\n":
                    file.write(b"\n")

    def _shrink(self) -> None:
        """Replace the file in one step by one that is at most three quarters as large as it may be."""
        self.close()
        lines = self._path.read_bytes().splitlines(keepends=True)
        room = self._most_bytes * 3 // 4
        fine_room = room // 2
        kept: list[bytes] = []
        for line in reversed(lines):
            if line.startswith(NAMES):
                kept.append(line)
            elif line.startswith(FINE):
                fine_room -= len(line)
                if fine_room >= 0:
                    kept.append(line)
                    room -= len(line)
            elif room > len(line):
                kept.append(line)
                room -= len(line)
        fresh = self._path.with_suffix(".tmp")
        fresh.write_bytes(b"".join(reversed(kept)))
        fresh.replace(self._path)

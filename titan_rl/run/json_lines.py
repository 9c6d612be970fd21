"""A file of JSON lines that is only ever whole."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from titan_rl.calls.plain import json_line


def cut_records(path: Path, keeps: Callable[[Mapping[str, Any]], bool]) -> None:
    """Leave out the records that are not to be kept, and what is no record. The file may be larger than memory, and is
    replaced in one step.

    Args:
        keeps: a KeyError or TypeError of it says that this is no record.
    """
    if not path.exists():
        return
    fresh = path.with_suffix(".tmp")
    with path.open("rb") as old, fresh.open("wb") as new:
        new.writelines(line for line in old if _stays(line, keeps))
    fresh.replace(path)


def _stays(line: bytes, keeps: Callable[[Mapping[str, Any]], bool]) -> bool:
    try:
        return line.endswith(b"\n") and keeps(json.loads(line))
    except (ValueError, KeyError, TypeError):
        return False


class JsonLines:
    """Appends records, each with one write: whoever follows the file sees whole lines, and a crash loses none."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None

    def append(self, record: Mapping[str, Any]) -> None:
        """
        Raises:
            OSError: the record could not be written. The file is as it was before: of a line that has no room, a part
                would spoil the next one, too.
        """
        line = (json_line(record) + "\n").encode()
        if self._file is None:
            self._file = self._path.open("ab", buffering=0)
        begin = os.fstat(self._file.fileno()).st_size
        if self._file.write(line) != len(line):
            self._file.truncate(begin)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))

    def close(self) -> None:
        """A later record opens the file again."""
        if self._file is not None:
            self._file.close()
            self._file = None

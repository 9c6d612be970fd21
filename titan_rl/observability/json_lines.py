"""A file of JSON lines that is only ever whole."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from titan_rl.plain import json_line


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

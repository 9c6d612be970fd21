"""Opens what is in a run's folder. A run may come from anybody: a link in it leads anywhere, and a pipe never ends."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


def open_file(path: Path) -> BinaryIO:
    """
    Raises:
        OSError: it cannot be opened, or is a link or no regular file.
    """
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    try:
        _check(path, os.fstat(file.fileno()))
    except OSError:
        file.close()
        raise
    return file


def read_file(path: Path) -> bytes:
    """
    Raises:
        OSError: as of `open_file`.
    """
    with open_file(path) as file:
        return file.read()


def file_status(path: Path) -> os.stat_result:
    """
    Raises:
        OSError: it is not there, or is a link or no regular file.
    """
    return _check(path, path.lstat())


def _check(path: Path, status: os.stat_result) -> os.stat_result:
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return status

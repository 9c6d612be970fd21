"""Reading of files that another process or user writes (JSON with NaN, files that grow, untrusted links), and writing
of files in one step.

A run's folder may come from anyone: a link in it may lead anywhere, and a pipe never ends. Python writes NaN and
Infinity, which JSON lacks; they are read as null.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import msgspec

from titan_rl.core.plain_data import json_line, plain_json


def open_file(path: Path) -> BinaryIO:
    """Open a regular file for reading.

    Raises:
        OSError: the file cannot be opened, is a link, or is not a regular file.
    """
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    try:
        _check(path, os.fstat(file.fileno()))
    except OSError:
        file.close()
        raise
    return file


def read_file(path: Path) -> bytes:
    """Read a regular file.

    Raises:
        OSError: see `open_file`.
    """
    with open_file(path) as file:
        return file.read()


LFS_POINTER = b"version https://git-lfs"
"""Beginning of the file that Git LFS leaves in place of a large file, until it fetches the file."""


def lfs_problem(path: Path) -> str | None:
    """Predicate of a message about a file that is a pointer of Git LFS; None for other files.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        if file.read(len(LFS_POINTER)) != LFS_POINTER:
            return None
    return f"is a pointer of Git LFS, not the file itself; run git lfs pull in {path.resolve().parent}"


def file_status(path: Path) -> os.stat_result:
    """Status of a regular file.

    Raises:
        OSError: the file does not exist, is a link, or is not a regular file.
    """
    return _check(path, path.lstat())


def is_same_file(file: BinaryIO, path: Path) -> bool:
    """Whether an open file is still the one at a path, and was neither removed nor replaced."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _check(path: Path, status: os.stat_result) -> os.stat_result:
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return status


def write_output(path: Path, parts: Iterable[bytes]) -> None:
    """Write a file that the user has named. A regular file is replaced atomically; links are followed, and a pipe or a
    device receives the bytes.

    Args:
        parts: Content of the file, in parts.

    Raises:
        OSError: The file cannot be written.
    """
    try:
        is_replaced = stat.S_ISREG(path.stat().st_mode)
    except FileNotFoundError:
        is_replaced = True
    if is_replaced:
        replace_file(Path(os.path.realpath(path)), parts)
        return
    with path.open("wb") as file:
        file.writelines(parts)


def replace_file(path: Path, parts: Iterable[bytes]) -> None:
    """Replace a file atomically, without following a link at `path`.

    Args:
        parts: Content of the file, in parts.

    Raises:
        OSError: The file cannot be written; it is unchanged.
    """
    fresh = path.with_name(f".{path.name}.part")
    try:
        with fresh.open("wb") as file:
            file.writelines(parts)
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)


_STRICT = msgspec.json.Decoder()


def read_json(text: bytes) -> dict[str, Any] | None:
    """Parse a JSON object; None if the text is not one."""
    try:
        found = _STRICT.decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        try:  # msgspec accepts neither NaN nor half of a surrogate pair
            found = plain_json(json.loads(text))
        except (ValueError, RecursionError):
            return None
    return as_table(found) if isinstance(found, dict) else None


def as_table(value: object) -> dict[str, Any]:
    """Return the value if it is a JSON object, otherwise an empty one."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def as_list(value: object) -> list[Any]:
    """Return the value if it is a list, otherwise an empty one."""
    return cast("list[Any]", value) if isinstance(value, list) else []


def strict_json(line: bytes) -> bytes:
    """Convert a line of Python's JSON to strict JSON. Strict lines are returned unchanged.

    Raises:
        ValueError: the line is not JSON.
    """
    try:
        _STRICT.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return json_line(json.loads(line.decode("utf-8", "replace"))).encode()
    return line


CHUNK_BYTES = 4 << 20
MAX_LINE_BYTES = 64 << 20
"""Longer lines are skipped."""

_MARK_BYTES = 64


@dataclass(frozen=True, slots=True)
class Chunk:
    """Bytes that were appended to a file.

    Args:
        begins: The lines are the first of the file, which was truncated, replaced or removed: earlier ones are
            invalid.
        start: Offset of the lines in the file.
        data: Complete lines.
        num_skipped: Lines before them that were too long.
        read: Bytes of the file read so far.
        size: Size of the file in bytes.
        is_last: Nothing new was left, except perhaps an incomplete line, and there are no lines. Otherwise there may be
            no lines because one is longer than a read.
    """

    begins: bool
    start: int
    data: bytes
    num_skipped: int
    read: int
    size: int
    is_last: bool

    @property
    def lines(self) -> Iterator[tuple[int, bytes]]:
        """The complete lines, as (offset in the file, line without its end)."""
        start = 0
        while (end := self.data.find(b"\n", start)) >= 0:
            yield self.start + start, self.data[start:end]
            start = end + 1


class Tail:
    """Reader of a growing file that returns each complete line once.

    A resumed run replaces the file by one without the steps that it repeats; the file is then read from its beginning.

    Args:
        path: The file, which need not exist yet.
        most: Largest number of bytes in a line. Longer lines are skipped, and are never in memory.
    """

    def __init__(self, path: Path, most: int = MAX_LINE_BYTES) -> None:
        self._path = path
        self._most = most
        self._offset = 0  # start of the next line
        self._looked = 0  # end of the bytes that were read; no line ends between the offset and here
        self._inode = 0
        self._mark = b""  # the last bytes before `_looked`

    def has_changed(self) -> bool:
        """Whether `read` would return anything new. Costs a query of the file's status."""
        try:
            status = file_status(self._path)
        except OSError:
            return bool(self._looked)
        return status.st_size != self._looked or (status.st_ino != self._inode and bool(self._looked))

    def read(self, at_most: int = CHUNK_BYTES) -> Chunk:
        """The next lines.

        Args:
            at_most: Number of bytes to read. A longer line is returned by the call that reads its end.
        """
        try:
            file = open_file(self._path)
        except OSError:
            begins = self._restart() if self._looked else False
            return Chunk(begins, 0, b"", 0, 0, 0, is_last=True)
        with file:
            status = os.fstat(file.fileno())
            begins = bool(self._looked) and not self._is_same(file, status)
            if begins:
                self._restart()
            self._inode = status.st_ino
            file.seek(self._looked)
            fresh = file.read(min(at_most, self._most))
            ends = self._looked + fresh.find(b"\n")
            stop = fresh.rfind(b"\n") + 1
            skips = stop > 0 and ends - self._offset > self._most
            if skips:
                self._offset = ends + 1
            start, data = self._offset, b""
            if stop:
                file.seek(start)
                data = file.read(self._looked + stop - start)
                self._offset = start + len(data)
        self._looked += len(fresh)
        self._mark = (self._mark + fresh[-_MARK_BYTES:])[-_MARK_BYTES:]
        size = max(status.st_size, self._looked)
        return Chunk(begins, start, data, int(skips), self._looked, size, is_last=not fresh)

    def _restart(self) -> bool:
        self._offset, self._looked, self._inode, self._mark = 0, 0, 0, b""
        return True

    def _is_same(self, file: BinaryIO, status: os.stat_result) -> bool:
        """Whether the file is the one that was read before. Inodes are reused, so the last bytes are compared, too."""
        if status.st_ino != self._inode or status.st_size < self._looked:
            return False
        file.seek(self._looked - len(self._mark))
        return file.read(len(self._mark)) == self._mark


def last_lines(path: Path, within: int = 16 << 20, at_once: int = 1 << 16) -> Iterator[bytes]:
    """Complete lines of a file, the last one first, read on demand.

    Args:
        within: Bytes at the end of the file; lines that begin before them are omitted.
        at_once: Bytes of the first read; each further read is twice as large.
    """
    try:
        file = open_file(path)
    except OSError:
        return
    with file:
        start = file.seek(0, os.SEEK_END)
        first = max(0, start - within)
        rest = b""  # bytes from `start` that have not been returned
        ends = False  # whether the rest belongs to a complete line
        while start > first:
            size = min(at_once, start - first)
            start -= size
            at_once *= 2
            file.seek(start)
            *lines, last = (file.read(size) + rest).split(b"\n")
            if lines:
                rest, *complete = *lines, *([last] if ends else [])
                ends = True
                yield from reversed(complete)
            else:
                rest = last
        if ends and not start:
            yield rest

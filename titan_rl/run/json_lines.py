"""JSON-lines files: appending whole records, reading records, and cutting a file back to the step from which a run
resumes."""

from __future__ import annotations

import errno
import json
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec

from titan_rl.core.calls.parsing import parse_json
from titan_rl.core.console import LOG, Console
from titan_rl.core.errors import means_no_space
from titan_rl.core.files import is_same_file
from titan_rl.core.plain_data import json_line

T = TypeVar("T", bound=msgspec.Struct)


def cut_records(path: Path, record: type[T], keeps: Callable[[T], bool]) -> None:
    """Remove the records for which `keeps` returns False, and lines that are not records. The file may be larger than
    memory. The file is replaced atomically, or left unchanged if every line stays. The kernel copies the part before
    the first removed line.

    Args:
        record: Type with the fields that `keeps` reads. A line is a record if it has all fields without a default.
            Skipping other fields takes hardly any time.
    """
    if not path.exists():
        return
    decoder = msgspec.json.Decoder(record)
    fresh = path.with_suffix(".tmp")

    def stays(line: bytes) -> bool:
        return (found := _read(line, decoder)) is not None and keeps(found)

    with path.open("rb") as old:
        num_kept = 0
        for line in old:
            if not stays(line):
                break
            num_kept += len(line)
        else:
            return
        with fresh.open("wb", buffering=0) as beginning:
            _copy(old.fileno(), beginning.fileno(), num_kept)
        with fresh.open("ab") as new:
            new.writelines(line for line in old if stays(line))
    fresh.replace(path)


def records(path: Path, record: type[T]) -> Iterator[T | None]:
    """Iterate over the records of a file, with None for a line that is not a record; see `cut_records`. A missing file
    has none."""
    if path.exists():
        decoder = msgspec.json.Decoder(record)
        with path.open("rb") as file:
            yield from (_read(line, decoder) for line in file)


def _copy(source: int, target: int, num_bytes: int) -> None:
    offset = 0
    while offset < num_bytes:
        sent = os.sendfile(target, source, offset, num_bytes - offset)
        if not sent:
            raise OSError(errno.EIO, "the file was truncated while it was copied")
        offset += sent


def _read(line: bytes, decoder: msgspec.json.Decoder[T]) -> T | None:
    if not line.endswith(b"\n"):
        return None
    try:
        return decoder.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        pass
    try:  # msgspec accepts neither NaN nor a lone surrogate
        return msgspec.convert(json.loads(line), decoder.type)
    except (ValueError, msgspec.ValidationError, RecursionError):
        return None


MOST_WAITING_BYTES = 64 << 20
"""Most bytes of records that wait in memory for room on the disk. Further records are lost."""


class RecordWaitsError(OSError):
    """The disk is full. The record waits in memory, and is written when there is room."""


class JsonLines:
    """File to which records are appended. Each record takes one write, so that readers see whole lines, and a crash
    loses none.

    While the disk is full, records wait in memory. If the file was removed or replaced, as by a rotation of logs, a new
    one begins.

    Args:
        console: Console for these events.
    """

    def __init__(self, path: Path, console: Console = LOG) -> None:
        self.console = console
        self._path = path
        self._file: BinaryIO | None = None
        self._waiting: deque[bytes] = deque()

    def append(self, record: Mapping[str, Any]) -> None:
        """Append one record, after those that wait.

        Raises:
            RecordWaitsError: The disk is full, and the record waits. The file has no partial line, which would also
                spoil the next one.
            OSError: The record could not be written, or is one too many to wait.
        """
        line = (json_line(record) + "\n").encode()
        if self._waiting and sum(map(len, self._waiting)) + len(line) > MOST_WAITING_BYTES:
            self._write_waiting()  # raises, unless there is room now
        self._waiting.append(line)
        try:
            self._write_waiting()
        except OSError as error:
            if not means_no_space(error):
                self._waiting.pop()
                raise
            raise RecordWaitsError(error.errno, error.strerror, str(self._path)) from error

    def _write_waiting(self) -> None:
        file = self._opened()
        while self._waiting:
            line, begin = self._waiting[0], os.fstat(file.fileno()).st_size
            if file.write(line) != len(line):
                file.truncate(begin)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
            self._waiting.popleft()

    def _opened(self) -> BinaryIO:
        if self._file is not None and not is_same_file(self._file, self._path):
            self.console.warning(f"{self._path} was removed or replaced; a new file begins there")
            self._file.close()
            self._file = None
        if self._file is None:
            self._file = self._path.open("ab", buffering=0)
        return self._file

    def close(self) -> None:
        """Write the records that wait, and close the file. A later record opens it again."""
        try:
            if self._waiting:
                self._write_waiting()
        except OSError as error:
            self.console.warning(f"{len(self._waiting)} records of {self._path} were lost: {error}")
            self._waiting.clear()
        if self._file is not None:
            self._file.close()
            self._file = None


class _Event(msgspec.Struct, gc=False):
    ph: str
    ts: float | None = None


def cut_traces(folder: Path, step: int) -> None:
    """Remove trace events that began after the loop entered the step after `step`, which is run again."""
    controller = folder / "controller.jsonl"
    if not controller.exists():
        return
    with controller.open("rb") as file:
        until = min((began for line in file if (began := _began(line, step)) is not None), default=None)
    if until is None:
        return

    for path in folder.glob("*.jsonl"):
        cut_records(path, _Event, lambda event: event.ph == "M" or (event.ts is not None and event.ts < until))


def _began(line: bytes, step: int) -> float | None:
    """Start time, in trace time, of the stage in a line if it belongs to a step after `step`; None for other lines."""
    if b'"step"' not in line:
        return None
    try:
        event = parse_json(line)
        return event["ts"] if event["args"]["step"] > step else None
    except (ValueError, KeyError, TypeError):
        return None

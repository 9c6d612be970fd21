"""JSON-lines files: appending whole records, reading records, and cutting a file back to the step from which a run
resumes."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec

from titan_rl.core.calls.parsing import parse_json
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


class JsonLines:
    """File to which records are appended. Each record takes one write, so that readers see whole lines, and a crash
    loses none."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None

    def append(self, record: Mapping[str, Any]) -> None:
        """Append one record.

        Raises:
            OSError: The record could not be written. The file is restored, because a partial line would also spoil the
                next one.
        """
        line = (json_line(record) + "\n").encode()
        if self._file is None:
            self._file = self._path.open("ab", buffering=0)
        begin = os.fstat(self._file.fileno()).st_size
        if self._file.write(line) != len(line):
            self._file.truncate(begin)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))

    def close(self) -> None:
        """Close the file. A later record opens it again."""
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

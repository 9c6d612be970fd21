"""The file format of a log: records that survive the death of their writer. Knows nothing of what is in them.

Each record is `MAGIC`, its length, and a CRC-32 of length and bytes, four bytes each, little-endian, then its bytes and
`END`. So no run of zeros is a record, and a torn one is not made whole by what is appended. A file is never cut: where
bytes are no record, because the writer was killed in the middle of one, power was lost, or the disk changed them, a
reader goes on at the next record that is whole.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

MAGIC = b"\xffTR\xfe"  # not in any UTF-8 text, whoever wrote it
END = b"\n"
_HEADER = struct.Struct("<4sII")
_LENGTH = struct.Struct("<I")

KEPT_BYTES = 1 << 24
"""Of a file that have been read and are in memory still."""


def read_log(path: Path, on_damage: Callable[[int, int], None] = lambda offset, size: None) -> Iterator[bytes]:
    """The whole records of a file, in order; none where it does not exist.

    Args:
        on_damage: told of bytes that are passed over: their offset and how many they are.

    Raises:
        OSError: it cannot be read, or is no file: nothing is waited for at the end of a pipe.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        return
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        if status.st_size:
            yield from _records_in(descriptor, on_damage)
    finally:
        os.close(descriptor)


def _records_in(descriptor: int, on_damage: Callable[[int, int], None]) -> Iterator[bytes]:
    with mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) as data:
        position = dropped = 0
        while position < len(data):
            if position - dropped >= KEPT_BYTES:
                until = position - position % mmap.PAGESIZE
                data.madvise(mmap.MADV_DONTNEED, dropped, until - dropped)
                dropped = until
            if (record := _record_at(data, position)) is None:
                start = position
                position = _next_record(data, start + 1)
                on_damage(start, position - start)
            else:
                yield record
                position += _HEADER.size + len(record) + len(END)


def frame(record: bytes) -> bytes:
    """The bytes of one record in a file."""
    return _HEADER.pack(MAGIC, len(record), _checksum(record)) + record + END


def _record_at(data: mmap.mmap, position: int) -> bytes | None:
    if len(data) - position < _HEADER.size:
        return None
    magic, length, checksum = _HEADER.unpack_from(data, position)
    end = position + _HEADER.size + length
    if magic != MAGIC or data[end : end + len(END)] != END:
        return None
    record = data[position + _HEADER.size : end]
    return record if _checksum(record) == checksum else None


def _next_record(data: mmap.mmap, position: int) -> int:
    """Where the next whole record begins; the end of the file if there is none."""
    while (position := data.find(MAGIC, position)) >= 0:
        if _record_at(data, position) is not None:
            return position
        position += 1
    return len(data)


def _checksum(record: bytes) -> int:
    return zlib.crc32(record, zlib.crc32(_LENGTH.pack(len(record))))

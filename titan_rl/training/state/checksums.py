"""The checksums of a checkpoint's files, kept beside them. Standard library only.

`checksums.json` of a folder: `{"state.json": {"bytes": 4182, "crc32": 2774310163}, ...}`, every other file of it. They
protect against accidents, not against an adversary.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from titan_rl.core.calls.parsing import parse_json
from titan_rl.core.errors import DamagedCheckpointError

NAME = "checksums.json"
BLOCK = 1 << 23  # bytes; long enough to run at the disk's speed
THREADS = 4  # a CRC runs at about 4 GB/s in each


@dataclass(frozen=True, slots=True)
class FileChecksum:
    """Of one file."""

    bytes: int
    crc32: int


class SummingWriter:
    """Writes a file and sums it on the way, each in its own thread.

    Args:
        took: told of the bytes that the file has taken, a block at a time.
    """

    def __init__(self, file: BinaryIO, took: Callable[[int], None] = lambda num_bytes: None) -> None:
        self._file = file
        self._took = took
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checksum")
        self._bytes = 0
        self._crc32 = 0

    def write(self, data: memoryview) -> None:
        """
        Args:
            data: [num_bytes]
        """
        for at in range(0, len(data), BLOCK):
            block = data[at : at + BLOCK]
            crc32 = self._thread.submit(zlib.crc32, block, self._crc32)
            self._file.write(block)
            self._crc32 = crc32.result()
            self._took(len(block))
        self._bytes += len(data)

    def close(self) -> FileChecksum:
        """Have everything on the disk. The file is the caller's."""
        self._thread.shutdown()
        self._file.flush()
        os.fsync(self._file.fileno())
        return FileChecksum(self._bytes, self._crc32)


def write_summed(path: Path, text: str) -> FileChecksum:
    """Write a small file."""
    data = text.encode()
    path.write_bytes(data)
    return FileChecksum(len(data), zlib.crc32(data))


def write_checksums(folder: Path, checksums: Mapping[str, FileChecksum]) -> None:
    (folder / NAME).write_text(_listed(checksums))


def _listed(checksums: Mapping[str, FileChecksum]) -> str:
    return json.dumps({name: asdict(each) for name, each in checksums.items()}, indent=1)


def write_checksums_of(folder: Path) -> None:
    """Read every file of a folder, sum it, and have all on the disk. The list appears when it is whole.

    Raises:
        OSError: a file cannot be read, or the list cannot be written.
    """
    found: dict[str, FileChecksum] = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        with path.open("rb", buffering=0) as file:
            crc32, size = _summed(file)
            os.fsync(file.fileno())
        found[path.relative_to(folder).as_posix()] = FileChecksum(size, crc32)
    temporary = folder / f".{NAME}.tmp"
    temporary.write_text(_listed(found))
    temporary.rename(folder / NAME)


def read_checksums(folder: Path) -> dict[str, FileChecksum]:
    """By file name.

    Raises:
        DamagedCheckpointError: the folder has no list of them, or what it has is none.
    """
    path = folder / NAME
    try:
        entries: dict[str, dict[str, int]] = parse_json(path.read_text())
        checksums = {name: FileChecksum(**values) for name, values in entries.items()}
    except FileNotFoundError:
        raise DamagedCheckpointError(f"{folder} has no {NAME}: it is no whole checkpoint") from None
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise DamagedCheckpointError(f"{path} is damaged: {error!r}") from error
    if strange := next((name for name in checksums if not _is_inside(name)), None):
        raise DamagedCheckpointError(f"{path} is damaged: {strange!r} is not the name of a file in it")
    return checksums


def verify(folder: Path, *, share: int = 0, of: int = 1) -> None:
    """Read every file of a checkpoint and compare it with its checksum.

    Args:
        share: which of `of` equal shares of the files to read; by default all.

    Raises:
        DamagedCheckpointError: with the first file that is missing, cannot be read, or is not what was written.
    """
    checksums = sorted(read_checksums(folder).items())[share::of]
    with ThreadPoolExecutor(THREADS, thread_name_prefix="checksum") as pool:
        complaints = pool.map(lambda entry: _complaint(folder / entry[0], entry[1]), checksums)
        if (first := next((complaint for complaint in complaints if complaint is not None), None)) is not None:
            raise DamagedCheckpointError(first)


def _complaint(path: Path, expected: FileChecksum) -> str | None:
    try:
        with path.open("rb", buffering=0) as file:
            crc32, size = _summed(file, min(BLOCK, expected.bytes + 1))
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    if size != expected.bytes:
        return f"{path} is damaged: it has {size} bytes, and {expected.bytes} were written"
    if crc32 != expected.crc32:
        return f"{path} is damaged: its checksum is {crc32:#010x}, and {expected.crc32:#010x} was written"
    return None


def _summed(file: FileIO, block_bytes: int = BLOCK) -> tuple[int, int]:
    """
    Returns:
        crc32 and number of bytes.
    """
    crc32, size = 0, 0
    block = memoryview(bytearray(block_bytes))
    while count := file.readinto(block):
        crc32 = zlib.crc32(block[:count], crc32)
        size += count
    return crc32, size


def _is_inside(name: str) -> bool:
    """Whether it is the path of a file in the folder, or in one of its folders."""
    parts = PurePosixPath(name).parts
    return bool(parts) and not name.startswith("/") and ".." not in parts

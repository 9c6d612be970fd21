"""Checkpoint folders: atomic writing, retention, and checksums of their files. Standard library only.

A checkpoint is written to a hidden folder next to its final path, flushed to disk, and then renamed. A trainer that is
cut off does not know that another trainer has replaced it, so several trainers may write the same checkpoint: each
writes under its own name, and the process that started them renames one of the folders.

`checksums.json` lists all other files of a folder: `{"state.json": {"bytes": 4182, "crc32": 2774310163}, ...}`.
Checksums protect against accidents, not against an adversary.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from titan_rl.core.calls.parsing import parse_json
from titan_rl.core.errors import CheckpointError, DamagedCheckpointError, NoSpaceError, means_no_space

_STEP = re.compile(r"step-(\d+)")


@contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """Give the block a folder that is moved to `path` when the block ends, and removed if the block raises.

    An existing folder at `path` stays valid until the block ends. Leftovers of a killed writer are removed.

    Raises:
        NoSpaceError: The disk is full.
        CheckpointError: Anything else in the block failed, or the move failed; see the error's cause. Interrupts pass
            unchanged.
    """
    temporary = temporary_of(path)
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        yield temporary
        _flush(temporary)
        rename_completed(temporary, path)
    except (NoSpaceError, CheckpointError):
        raise
    except Exception as error:
        raise unwritten(path, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def rename_completed(written: Path, path: Path) -> None:
    """Rename a finished folder to `path` in the same parent. An existing folder there stays valid until the rename.

    Raises:
        NoSpaceError: The disk is full.
        CheckpointError: The folder could not be renamed; `path` is unchanged.
    """
    replaced = path.with_name(f".{path.name}.old.tmp")
    try:
        if path.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            path.rename(replaced)
        try:
            written.rename(path)
        except OSError:
            if replaced.exists():
                replaced.rename(path)
            raise
        _flush_entry(path.parent)
    except OSError as error:
        raise unwritten(path, error) from error
    finally:
        if path.exists():
            shutil.rmtree(replaced, ignore_errors=True)


def unwritten(path: Path, error: Exception) -> CheckpointError:
    """Build the error for a folder that could not be written because of `error`."""
    if means_no_space(error):
        return NoSpaceError(f"no space left in {path.parent}, where {path.name} was being written")
    return CheckpointError(f"{path} could not be written: {error}")


def temporary_of(path: Path) -> Path:
    """Folder into which a block of `atomic_directory(path)` writes."""
    return path.with_name(f".{path.name}.tmp")


def written_by(writer: str, path: Path) -> Path:
    """Folder in which one of several writers keeps `path` until it is renamed."""
    return path.with_name(f".{path.name}.{writer}")


def being_written(root: Path, name: str = "step-") -> list[Path]:
    """List the temporary folders in `root` for names with a prefix. They are in progress, or left by a killed
    writer."""
    return [*root.glob(f".*{name}*")]


def step_directory(root: Path, step: int) -> Path:
    """Folder of a checkpoint: `step_directory(Path("checkpoints"), 40)` is `checkpoints/step-000040`."""
    return root / f"step-{step:06d}"


def step_of(checkpoint: Path) -> int:
    """Step of a checkpoint: `step_of(Path("checkpoints/step-000040"))` is 40."""
    return int(checkpoint.name.removeprefix("step-"))


def list_checkpoints(root: Path) -> list[Path]:
    """List the complete checkpoints in `root`, oldest first."""
    if not root.is_dir():
        return []
    found = [(int(match[1]), path) for path in root.iterdir() if (match := _STEP.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def latest(root: Path) -> Path | None:
    """Newest complete checkpoint in `root`, or None."""
    checkpoints = list_checkpoints(root)
    return checkpoints[-1] if checkpoints else None


def keep_last(root: Path, count: int, best: Path | None = None) -> None:
    """Delete all but the newest `count` checkpoints, at least one, and `best`. Errors of deletion are ignored."""
    for path in list_checkpoints(root)[:-count]:
        if path != best:
            shutil.rmtree(path, ignore_errors=True)


def _flush(folder: Path) -> None:
    for parent, _, files in os.walk(folder):
        for name in files:
            _flush_entry(Path(parent, name))
        _flush_entry(Path(parent))


def _flush_entry(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


CHECKSUMS = "checksums.json"
BLOCK = 1 << 23  # bytes; large enough for the disk's full speed
THREADS = 4  # each computes a CRC at about 4 GB/s


@dataclass(frozen=True, slots=True)
class FileChecksum:
    """Size and CRC of one file."""

    bytes: int
    crc32: int


@dataclass(slots=True)
class WriteProgress:
    """Number of bytes written to disk so far, which another thread may read."""

    num_bytes: int = 0


class SummingWriter:
    """Writes a file and computes its checksum, each in its own thread.

    Args:
        progress: Counter of the written bytes, updated after each block.
    """

    def __init__(self, file: BinaryIO, progress: WriteProgress) -> None:
        self._file = file
        self._progress = progress
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checksum")
        self._bytes = 0
        self._crc32 = 0

    def write(self, data: memoryview) -> None:
        """Write bytes.

        Args:
            data: Bytes to write.  # uint8 [num_bytes]
        """
        for at in range(0, len(data), BLOCK):
            block = data[at : at + BLOCK]
            crc32 = self._thread.submit(zlib.crc32, block, self._crc32)
            self._file.write(block)
            self._crc32 = crc32.result()
            self._progress.num_bytes += len(block)
        self._bytes += len(data)

    def close(self) -> FileChecksum:
        """Flush everything to disk. The caller closes the file."""
        self._thread.shutdown()
        self._file.flush()
        os.fsync(self._file.fileno())
        return FileChecksum(self._bytes, self._crc32)


def write_summed(path: Path, text: str) -> FileChecksum:
    """Write a small file, and return its checksum."""
    data = text.encode()
    path.write_bytes(data)
    return FileChecksum(len(data), zlib.crc32(data))


def write_checksums(folder: Path, checksums: Mapping[str, FileChecksum]) -> None:
    """Write the list of checksums, atomically."""
    temporary = folder / f".{CHECKSUMS}.tmp"
    temporary.write_text(json.dumps({name: asdict(each) for name, each in checksums.items()}, indent=1))
    temporary.rename(folder / CHECKSUMS)


def write_checksums_of(folder: Path) -> None:
    """Read every file of a folder, flush it to disk, and write the list of checksums.

    Raises:
        OSError: A file cannot be read, or the list cannot be written.
    """
    found: dict[str, FileChecksum] = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        with path.open("rb", buffering=0) as file:
            crc32, size = _summed(file)
            os.fsync(file.fileno())
        found[path.relative_to(folder).as_posix()] = FileChecksum(size, crc32)
    write_checksums(folder, found)


def read_checksums(folder: Path) -> dict[str, FileChecksum]:
    """Read the checksums of a folder, by file name.

    Raises:
        DamagedCheckpointError: The list is missing or damaged.
    """
    path = folder / CHECKSUMS
    try:
        entries: dict[str, dict[str, int]] = parse_json(path.read_text())
        checksums = {name: FileChecksum(**values) for name, values in entries.items()}
    except FileNotFoundError:
        raise DamagedCheckpointError(f"{folder} has no {CHECKSUMS}: it is not a complete checkpoint") from None
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise DamagedCheckpointError(f"{path} is damaged: {error!r}") from error
    if invalid := next((name for name in checksums if not _is_inside(name)), None):
        raise DamagedCheckpointError(f"{path} is damaged: {invalid!r} is not the name of a file in it")
    return checksums


def verify(folder: Path, *, share: int = 0, of: int = 1) -> None:
    """Read every file of a checkpoint and compare it with its checksum.

    Args:
        share: Index of the share to read if the files are divided into `of` equal shares; by default, all files are
            read.

    Raises:
        DamagedCheckpointError: A file is missing, cannot be read, or is not what was written. The message names the
            first such file.
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
    """CRC-32 and number of bytes of a file."""
    crc32, size = 0, 0
    block = memoryview(bytearray(block_bytes))
    while count := file.readinto(block):
        crc32 = zlib.crc32(block[:count], crc32)
        size += count
    return crc32, size


def _is_inside(name: str) -> bool:
    """Whether a name is a relative path that stays inside its folder."""
    parts = PurePosixPath(name).parts
    return bool(parts) and not name.startswith("/") and ".." not in parts

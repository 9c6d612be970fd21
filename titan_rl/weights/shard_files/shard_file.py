"""The file of one shard, which its writer and its readers map into their memory.

Writing into pages that were written before is four times as fast as writing into new ones, so the file of a released
version is used again. `flock` on the file keeps that safe:

- a reader holds a shared lock from before it looks at the bytes until the last tensor that views them is gone;
- a writer takes the exclusive lock before it touches a used file, and where it cannot, it makes a new file.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import shutil
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from titan_rl.core.errors import StateDictError

ALIGNMENT = 64  # bytes: a cache line, and what vector loads like best
BLOCK_WORDS = 131072  # 1 MiB: long enough for NumPy to run at full speed, short enough to stay in the cache


class RunningChecksum:
    """CRC-32 over the 64-bit sums of the blocks of 1 MiB.

    Summing words runs at the speed of memory, seven times as fast as a CRC of every byte, and faster yet right after
    the bytes were written, while they are in the cache. Every change inside one word is found, and so is every mixture
    of two versions unless all their blocks have equal sums; the CRC finds blocks that changed places. It protects
    against accidents, not against an adversary.

    Args:
        data: [num_bytes], a multiple of 8.
    """

    def __init__(self, data: NDArray[np.uint8]) -> None:
        self._words = data.view(np.uint64)
        self._sums: list[np.uint64] = []

    def written(self, num_bytes: int) -> None:
        """So many bytes from the start are what they will be. Called with ever more."""
        while (at := len(self._sums) * BLOCK_WORDS) + BLOCK_WORDS <= num_bytes // 8:
            self._sums.append(self._words[at : at + BLOCK_WORDS].sum())  # wraps at 2**64

    def value(self) -> int:
        """Once all bytes are written."""
        self.written(self._words.nbytes)
        rest = self._words[len(self._sums) * BLOCK_WORDS :]
        sums = [*self._sums, rest.sum()] if len(rest) else self._sums
        return zlib.crc32(np.array(sums, np.uint64).tobytes())


def checksum(data: NDArray[np.uint8]) -> int:
    """The `RunningChecksum` of bytes that are there."""
    return RunningChecksum(data).value()


class ShardFile:
    """A writer's. `path` is where it is now; renaming it is what publishes and withdraws it.

    The writer owns the exclusive lock from creation until `publish`, and again after `reclaim`.

    Raises:
        OSError: there is no room for it, or the file cannot be made.
    """

    def __init__(self, path: Path, num_bytes: int) -> None:
        self.path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            self.resize(num_bytes)
        except BaseException:
            self.unlink()
            raise

    def resize(self, num_bytes: int) -> None:
        """Make `data` a [num_bytes] array over the file. The bytes are there: writing to them cannot fail."""
        size = max(num_bytes, ALIGNMENT)  # an empty file cannot be mapped
        if size == os.fstat(self._file).st_size:
            return
        os.ftruncate(self._file, size)
        if hasattr(os, "posix_fallocate"):  # a full tmpfs would else kill the process with SIGBUS at the first write
            try:
                os.posix_fallocate(self._file, 0, size)
            except OSError as error:
                root = self.path.parent.parent
                free = f"{shutil.disk_usage(root).free / 1e6:.1f} MB are free"
                fix = f"{free}; make room there, for a container by --shm-size"
                raise OSError(error.errno, f"{error.strerror}, {fix}", str(root)) from None
        self.data: NDArray[np.uint8] = np.frombuffer(mmap.mmap(self._file, size), np.uint8)[:num_bytes]

    def publish(self, path: Path) -> None:
        """Let readers in, under this name."""
        fcntl.flock(self._file, fcntl.LOCK_UN)
        self.rename(path)

    def rename(self, path: Path) -> None:
        os.rename(self.path, path)
        self.path = path

    def reclaim(self) -> bool:
        """Take the file for writing again. False where a reader has it mapped."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def unlink(self) -> None:
        """Remove the name. The memory goes when the last reader's mapping does."""
        self.path.unlink(missing_ok=True)
        os.close(self._file)


def lock_published(path: Path) -> int:
    """A descriptor of a published shard with a reader's lock: it is not written again before that is closed.

    Raises:
        StateDictError: it is gone.
    """
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise StateDictError(
            f"{path} cannot be opened ({error.strerror}): it was released, or its writer ended"
        ) from error
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(file), os.stat(path)):
            raise FileNotFoundError
    except (BlockingIOError, FileNotFoundError) as error:
        os.close(file)
        raise StateDictError(f"{path} was released while it was opened") from error
    return file

"""A reader's end of shared memory: published shards, mapped and verified."""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from titan_rl.core.errors import StateDictError
from titan_rl.weights.shard_files.shard_file import ALIGNMENT, checksum, lock_published

_POPULATE = getattr(mmap, "MAP_POPULATE", 0)  # all page-table entries at once, twice as fast as one fault at a time


class ShardReader:
    """Maps shards, each file once: a writer uses the files of released versions again, and making the page-table
    entries takes as long as copying the bytes.

    A mapping alone keeps nobody from writing to the file. The lock that does is taken for each version anew, and held
    as long as anything views the bytes. All methods may be called from any thread.
    """

    def __init__(self) -> None:
        self._mapped: dict[tuple[int, int, int], _MappedFile] = {}  # by device, inode and size
        self._lock = threading.RLock()  # the garbage collector may call `_let_go` anywhere

    def open(self, path: Path, num_bytes: int, expected_checksum: int) -> NDArray[np.uint8]:
        """The verified bytes of a published shard. They cannot change as long as anything views them.

        The mapping is read-only: the system ends a process that writes to it.

        Returns:
            [num_bytes] or more

        Raises:
            StateDictError: it is gone, or its size or checksum differ.
        """
        file = lock_published(path)
        try:
            size = os.fstat(file).st_size
            if size != max(num_bytes, ALIGNMENT):
                raise StateDictError(f"{path} has {size} bytes, its manifest says {num_bytes}")
            data = np.frombuffer(self._mapping_of(file, path), np.uint8)
        except BaseException:
            os.close(file)
            raise
        weakref.finalize(data, self._let_go, file).atexit = False
        found = checksum(data[:num_bytes])
        if found != expected_checksum:
            raise StateDictError(f"{path} has checksum {found:#010x}, its manifest says {expected_checksum:#010x}")
        return data

    def _mapping_of(self, locked: int, path: Path) -> mmap.mmap:
        stat = os.fstat(locked)
        key = stat.st_dev, stat.st_ino, stat.st_size
        with self._lock:
            self._drop_nameless()
            if (file := self._mapped.get(key)) is None:
                file = self._mapped[key] = _MappedFile(path, stat)
            return file.mapping

    def _let_go(self, locked: int) -> None:
        """Nothing views the version any more: give its lock back."""
        os.close(locked)
        with self._lock:
            self._drop_nameless()

    def _drop_nameless(self) -> None:
        """A file without a name is never published again, and its mapping would keep its memory."""
        self._mapped = {key: file for key, file in list(self._mapped.items()) if file.has_name}


class _MappedFile:
    """A mapping through a descriptor of its own, since one that shares the locked one would hold its lock."""

    def __init__(self, path: Path, expected: os.stat_result) -> None:
        try:
            self._file = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise StateDictError(f"{path} was released while it was opened") from error
        weakref.finalize(self, os.close, self._file).atexit = False
        if not os.path.samestat(os.fstat(self._file), expected):
            raise StateDictError(f"{path} was released while it was opened")
        flags = mmap.MAP_SHARED | _POPULATE
        self.mapping = mmap.mmap(self._file, expected.st_size, flags=flags, prot=mmap.PROT_READ)

    @property
    def has_name(self) -> bool:
        return os.fstat(self._file).st_nlink > 0

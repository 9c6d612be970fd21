"""Shards as files in shared memory, in a folder of their writer, which is cleaned up once the writer is dead.

An owner holds an exclusive `flock` on its folder. The kernel releases the lock when the process ends, however it ends,
so a process that gets the lock knows that the owner is gone. Unlike a process id, a lock is never reused, and it has
the same meaning in every container that shares the file system.

Writing into pages that were written before is four times as fast as writing into new ones, so the file of a released
version is reused. `flock` on the file keeps that safe:

- a reader takes a shared lock before it reads the bytes, and holds it until the last tensor that views them is gone;
- a writer takes the exclusive lock before it writes to a used file. If a reader still holds it, it makes a new file.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import shutil
import tempfile
import threading
import weakref
import zlib
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from titan_rl.core.errors import StateDictError

logger = logging.getLogger(__name__)


class OwnedFolder:
    """A new folder `<prefix><random>` in `root`, locked by this process.

    Raises:
        OSError: The folder cannot be made.
    """

    def __init__(self, prefix: str, root: Path) -> None:
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=root))
            try:
                self._lock = os.open(self.path, os.O_RDONLY)
            except FileNotFoundError:
                continue  # another process removed it before it was locked
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            if self.path.exists():
                return
            os.close(self._lock)

    def restore(self) -> None:
        """Make the folder again if it was removed.

        Raises:
            OSError: The folder cannot be made.
        """
        if self.path.exists():
            return
        self.path.mkdir(mode=0o700)
        lock = os.open(self.path, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.close(self._lock)
        self._lock = lock

    def remove(self) -> None:
        """Delete the folder and its contents, then release the lock."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def clean_dead_folders(prefix: str, root: Path) -> list[Path]:
    """Remove the folders `<prefix>*` in `root` whose owners are dead, and return them.

    A process that has a file open or mapped can still read it. Folders of living owners and of other users are kept.
    """
    removed: list[Path] = []
    for path in root.glob(f"{prefix}*"):
        try:
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:  # the path was removed, belongs to another user, or is not a folder
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
            removed.append(path)
        except BlockingIOError:
            pass  # the owner is alive
        finally:
            os.close(lock)
    return removed


PREFIX = "titan_rl-weights-"


def shard_root() -> Path:
    """Default folder of shards: /dev/shm, or the temporary folder on a system without it."""
    shm = Path("/dev/shm")
    return shm if os.access(shm, os.W_OK) else Path(tempfile.gettempdir())


def shard_folder(run_id: str, root: Path | None = None) -> OwnedFolder:
    """Make a folder for one writer's shards. The run and process ids in its name are only for people.

    Raises:
        OSError: The folder cannot be made.
    """
    return OwnedFolder(f"{PREFIX}{run_id}-{os.getpid()}-", root or shard_root())


def shard_folders(run_id: str) -> list[Path]:
    """Existing shard folders of a run."""
    return list(shard_root().glob(f"{PREFIX}{run_id}-*"))


def clean_dead_shards(root: Path | None = None) -> list[Path]:
    """Remove the folders of dead writers, and return them. Readers with a shard mapped keep reading."""
    return clean_dead_folders(PREFIX, root or shard_root())


ALIGNMENT = 64  # bytes: a cache line, and the best alignment for vector loads
BLOCK_WORDS = 131072  # 1 MiB: long enough for NumPy to run at full speed, short enough to stay in the cache
PART_BLOCKS = 16  # blocks that a thread takes at a time, which lasts a hundred times as long as handing them over
MOST_THREADS = 4  # one core uses a fraction of the memory's bandwidth, and a few use most of it


def checksum(data: NDArray[np.uint8]) -> int:
    """CRC-32 over the 64-bit sums of the blocks of 1 MiB.

    Summing words runs at the speed of memory, seven times as fast as a CRC of every byte, and even faster right after
    the bytes were written, while they are in the cache. It detects every change within one word, every mixture of two
    versions unless all their blocks have equal sums, and, by the CRC, swapped blocks. It protects against accidents,
    not against an adversary.

    Args:
        data: Bytes, whose number is a multiple of 8.  # [num_bytes]
    """
    return checksum_of_parts(len(data), lambda first, last: block_sums(data[first:last]))


def block_sums(data: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """Sums of the blocks, of which the last may be shorter.  # [num_bytes] -> [num_blocks]"""
    words = data.view(np.uint64)
    rest = len(words) % BLOCK_WORDS
    sums = words[: len(words) - rest].reshape(-1, BLOCK_WORDS).sum(1)  # wraps at 2**64
    return np.append(sums, words[-rest:].sum()) if rest else sums


def checksum_of_parts(num_bytes: int, sums_of: Callable[[int, int], NDArray[np.uint64]]) -> int:
    """Compute the checksum of `num_bytes` bytes in several threads.

    Args:
        sums_of: Returns the sums of the blocks from the first byte to before the last; both are multiples of a block,
            or the end. May also write them. Called from any thread.
    """
    step = PART_BLOCKS * BLOCK_WORDS * 8
    starts = range(0, num_bytes, step)
    ends = [min(start + step, num_bytes) for start in starts]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = min(len(starts), cores, MOST_THREADS)
    if threads <= 1:
        sums = list(map(sums_of, starts, ends))
    else:
        with ThreadPoolExecutor(threads, "shard") as pool:
            sums = list(pool.map(sums_of, starts, ends))
    return zlib.crc32(np.concatenate(sums).tobytes() if sums else b"")


_POPULATE = getattr(mmap, "MAP_POPULATE", 0)  # all page-table entries at once: twice as fast as one fault at a time


class ShardFile:
    """A shard's file as its writer sees it. Renaming the file, from and to `path`, publishes and withdraws it.

    The writer owns the exclusive lock from creation until `publish`, and again after `reclaim`.

    Raises:
        OSError: There is no space for the file, or it cannot be made.
    """

    def __init__(self, path: Path, num_bytes: int) -> None:
        self.path = path
        self._file = self._new_file()
        try:
            self.resize(num_bytes)
        except BaseException:
            self.unlink()
            raise

    def _new_file(self) -> int:
        file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(file, fcntl.LOCK_EX)
        return file

    @property
    def is_linked(self) -> bool:
        """Whether the file still has its name."""
        return os.fstat(self._file).st_nlink > 0

    def restore(self, path: Path) -> None:
        """Publish a file with the same content, after the name of this one was removed.

        Raises:
            OSError: See `ShardFile`.
        """
        data, before = self.data, self._file
        self.path = path
        self._file = self._new_file()
        os.close(before)
        ShardFile.resize(self, len(data))
        self.data[:] = data
        fcntl.flock(self._file, fcntl.LOCK_UN)

    def resize(self, num_bytes: int) -> None:
        """Make `data` an array over the file. Its memory is allocated, so writing to it cannot fail.  # [num_bytes]"""
        size = max(num_bytes, ALIGNMENT)  # an empty file cannot be mapped
        if size == os.fstat(self._file).st_size:
            return
        os.ftruncate(self._file, size)
        if hasattr(os, "posix_fallocate"):  # otherwise a full tmpfs kills the process with SIGBUS at the first write
            try:
                os.posix_fallocate(self._file, 0, size)
            except OSError as error:
                root = self.path.parent.parent
                free = f"{shutil.disk_usage(root).free / 1e6:.1f} MB are free"
                fix = f"{free}; make room there, or increase --shm-size of a container"
                raise OSError(error.errno, f"{error.strerror}, {fix}", str(root)) from None
        mapping = mmap.mmap(self._file, size, flags=mmap.MAP_SHARED | _POPULATE)
        self.data: NDArray[np.uint8] = np.frombuffer(mapping, np.uint8)[:num_bytes]

    def publish(self, path: Path) -> None:
        """Let readers open the file under this name."""
        fcntl.flock(self._file, fcntl.LOCK_UN)
        self.rename(path)

    def rename(self, path: Path) -> None:
        os.rename(self.path, path)
        self.path = path

    def reclaim(self) -> bool:
        """Lock the file for writing again. Returns False if a reader holds its lock."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def unlink(self) -> None:
        """Remove the name. The memory is freed with the last reader's mapping."""
        self.path.unlink(missing_ok=True)
        os.close(self._file)


def lock_published(path: Path) -> int:
    """Open a published shard with a reader's lock, and return its descriptor. The shard is not written to before the
    descriptor is closed.

    Raises:
        StateDictError: The shard is gone.
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


NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM)

S = TypeVar("S", bound=ShardFile)


class ShardStore(Generic[S]):
    """Shards of the versions that a writer keeps, in a separate folder that is made for the first one.

    A shard is written under a hidden name and published by renaming it, so a version is whole or absent. All methods
    may be called from any thread. Subclasses make the shards.

    Args:
        run_id: Part of the folder's name.
        keep: Largest number of versions at a time, including the one being written. A further version releases the
            oldest. With 2, the memory is double-buffered: readers have the last version while the next one overwrites
            the version before it.
        root: Folder in which the folder is made; by default that of `shard_root`.

    Raises:
        ValueError: `run_id` is not a plain file name, or `keep` is below 1.
    """

    def __init__(self, run_id: str, *, keep: int, root: Path | None) -> None:
        if not run_id or "/" in run_id or "\0" in run_id:
            raise ValueError(f"run_id is {run_id!r}; it becomes part of a folder's name and must be a plain file name")
        if keep < 1:
            raise ValueError(f"keep is {keep}; at least 1 version must be kept")
        self._run_id = run_id
        self._keep = keep
        self._root = root
        self._folder: OwnedFolder | None = None
        self._published: dict[int, S] = {}  # by version, oldest first
        self._spares: list[S] = []  # released shards, for reuse
        self._names = count()
        self._lock = threading.Lock()  # guards the fields above; not held while bytes are copied
        self._closed = False
        self._held: int | None = None

    def hold(self, version: int | None) -> None:
        """Keep a published version in addition to those that `keep` counts, until the next call. `release` still frees
        it. None holds no version."""
        with self._lock:
            self._held = version

    def _make(self, path: Path, num_bytes: int) -> S:
        """Make a shard of `num_bytes` bytes."""
        raise NotImplementedError

    @contextmanager
    def writing(self, version: int, num_bytes: int) -> Generator[S]:
        """Context that yields a shard to fill, and publishes it at the end of the block. If the block raises, nothing
        of the version is left.

        Raises:
            StateDictError: The version is published already, there is no space, or the store is closed. Nothing of the
                version is left.
        """
        try:
            shard = self._take(version, num_bytes)
        except OSError as error:
            problem = "no room for" if error.errno in NO_ROOM else "no file can be made for"
            raise StateDictError(f"{problem} version {version}, {num_bytes / 1e6:.1f} MB: {error}") from error
        try:
            yield shard
            with self._lock:
                folder = self._folder_for(version)
                if shard.is_linked:
                    shard.publish(folder.path / str(version))
                else:
                    folder.restore()
                    shard.restore(folder.path / str(version))
                self._published[version] = shard
        except BaseException:
            shard.unlink()
            raise

    @property
    def versions(self) -> set[int]:
        """Versions that are published and not released."""
        with self._lock:
            return set(self._published)

    @property
    def shards(self) -> list[S]:
        """Published shards, and spare ones for later versions."""
        with self._lock:
            return [*self._published.values(), *self._spares]

    def shard_of(self, version: int) -> S:
        """The shard of a published version.

        Raises:
            KeyError: The version is not published.
        """
        with self._lock:
            return self._published[version]

    def release(self, version: int) -> None:
        """Withdraw a version. Its memory is reused for the next one, or freed once its readers are done."""
        with self._lock:
            self._retire(version)

    def close(self) -> None:
        """Free everything. Mappings of readers stay valid; later calls of `writing` fail."""
        with self._lock:
            self._closed = True
            for shard in [*self._published.values(), *self._spares]:
                shard.unlink()
            self._published.clear()
            self._spares.clear()
            if self._folder is not None:
                self._folder.remove()
                self._folder = None

    def _folder_for(self, version: int) -> OwnedFolder:
        if self._closed:
            raise StateDictError(f"version {version} cannot be published: the transport is closed")
        if version in self._published:
            raise StateDictError(f"version {version} is published already; release it first")
        if self._folder is None:
            clean_dead_shards(self._root)
            self._folder = shard_folder(self._run_id, self._root)
        return self._folder

    def _take(self, version: int, num_bytes: int) -> S:
        """A shard for writing, which no reader has locked: a spare one if possible, otherwise a new one."""
        with self._lock:
            folder = self._folder_for(version)
            self._restore(folder)
            others = [published for published in self._published if published != self._held]
            for oldest in others[: max(0, len(others) + 1 - self._keep)]:
                self._retire(oldest)
            while self._spares:
                shard = self._spares.pop(0)
                try:
                    if shard.reclaim():
                        shard.resize(num_bytes)
                        return shard
                except BaseException:
                    shard.unlink()
                    raise
                shard.unlink()
            return self._make(self._hidden_name(folder), num_bytes)

    def _restore(self, folder: OwnedFolder) -> None:
        """Make again what was removed. The content is still in memory."""
        removed = [shard for shard in self._published.values() if not shard.is_linked]
        folder.restore()
        for shard in [shard for shard in self._spares if not shard.is_linked]:
            self._spares.remove(shard)
            shard.unlink()
        for shard in removed:
            shard.restore(shard.path)
        if removed:
            logger.warning(
                "published weights in %s were removed, and are made again; systemd removes a user's shared memory at "
                "the logout unless RemoveIPC=no is set in logind.conf",
                folder.path,
            )

    def _retire(self, version: int) -> None:
        shard = self._published.pop(version, None)
        if shard is None:
            return
        assert self._folder is not None
        if len(self._published) + len(self._spares) < self._keep:
            shard.rename(self._hidden_name(self._folder))
            self._spares.append(shard)
        else:
            shard.unlink()

    def _hidden_name(self, folder: OwnedFolder) -> Path:
        return folder.path / f".{next(self._names)}"


class FileShardStore(ShardStore[ShardFile]):
    """Store of shards in shared memory."""

    def _make(self, path: Path, num_bytes: int) -> ShardFile:
        return ShardFile(path, num_bytes)


class ShardReader:
    """Maps shards, each file only once: a writer reuses the files of released versions, and making the page-table
    entries takes as long as copying the bytes.

    A mapping alone does not prevent the writer from writing to the file, but a lock does. It is taken for each version,
    and held as long as anything views the bytes. All methods may be called from any thread.
    """

    def __init__(self) -> None:
        self._mapped: dict[tuple[int, int, int], _MappedFile] = {}  # by device, inode and size
        self._lock = threading.RLock()  # the garbage collector may call `_unlock` anywhere

    def open(self, path: Path, num_bytes: int, expected_checksum: int) -> NDArray[np.uint8]:
        """Map a published shard and verify it. Its bytes cannot change as long as anything views them.

        The mapping is read-only: the system ends a process that writes to it.

        Returns:
            Bytes of the file.  # [num_bytes] or more

        Raises:
            StateDictError: The shard is gone, or its size or checksum differs.
        """
        file = lock_published(path)
        try:
            size = os.fstat(file).st_size
            if size != max(num_bytes, ALIGNMENT):
                raise StateDictError(f"{path} has {size} bytes, but its manifest says {num_bytes}")
            data = np.frombuffer(self._mapping_of(file, path), np.uint8)
        except BaseException:
            os.close(file)
            raise
        weakref.finalize(data, self._unlock, file).atexit = False
        found = checksum(data[:num_bytes])
        if found != expected_checksum:
            raise StateDictError(f"{path} has checksum {found:#010x}, but its manifest says {expected_checksum:#010x}")
        return data

    def _mapping_of(self, locked: int, path: Path) -> mmap.mmap:
        stat = os.fstat(locked)
        key = stat.st_dev, stat.st_ino, stat.st_size
        with self._lock:
            self._drop_unlinked()
            if (file := self._mapped.get(key)) is None:
                file = self._mapped[key] = _MappedFile(path, stat)
            return file.mapping

    def _unlock(self, locked: int) -> None:
        """Release the lock of a version that nothing views any more."""
        os.close(locked)
        with self._lock:
            self._drop_unlinked()

    def _drop_unlinked(self) -> None:
        """Drop the mappings of unlinked files, which are never published again but would keep their memory."""
        self._mapped = {key: file for key, file in list(self._mapped.items()) if file.is_linked}


class _MappedFile:
    """A mapping of a file through a separate descriptor, since a mapping through the locked one would hold its lock."""

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
    def is_linked(self) -> bool:
        return os.fstat(self._file).st_nlink > 0

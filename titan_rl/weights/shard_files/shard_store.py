"""A writer's shards: the versions that are published, and the memory that the next one is written to."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Generic, TypeVar

from titan_rl.core.errors import StateDictError
from titan_rl.weights.shard_files.owned_folder import OwnedFolder
from titan_rl.weights.shard_files.shard_file import ShardFile
from titan_rl.weights.shard_files.shard_folder import clean_dead_shards, shard_folder

S = TypeVar("S", bound=ShardFile)
T = TypeVar("T")


class ShardStore(Generic[S]):
    """Segments of the versions kept, in a folder of the writer's own that is made for the first one.

    Writing happens under a hidden name and a rename publishes, so a version is whole or absent. All methods may be
    called from any thread.

    Args:
        run_id: part of the folder's name.
        make: a new shard of that many bytes.
        keep: most versions at a time, the one being written included; one more releases the oldest. With 2 the memory
            is double-buffered: readers have the last version while the next is written over the one before.
        root: where the folder is made; by default /dev/shm, or the temporary folder where there is none.

    Raises:
        ValueError: `run_id` is no plain file name, or `keep` is below 1.
    """

    def __init__(self, run_id: str, make: Callable[[Path, int], S], *, keep: int, root: Path | None) -> None:
        if not run_id or "/" in run_id or "\0" in run_id:
            raise ValueError(f"run_id is {run_id!r}; it becomes part of a folder's name and must be a plain file name")
        if keep < 1:
            raise ValueError(f"keep is {keep}; at least 1 version must be kept")
        self._run_id = run_id
        self._make = make
        self._keep = keep
        self._root = root
        self._folder: OwnedFolder | None = None
        self._published: dict[int, S] = {}  # oldest first
        self._spares: list[S] = []  # released, to be written again
        self._names = count()
        self._lock = threading.Lock()  # of the fields above; not held while bytes are copied
        self._closed = False

    def write(self, version: int, num_bytes: int, fill: Callable[[S], T]) -> tuple[Path, T]:
        """Have a shard filled and publish it.

        Returns:
            where it is, and what `fill` returned.

        Raises:
            StateDictError: the version is published already, there is no room, or the store is closed. Nothing of the
                version is left then, nor if `fill` raises.
        """
        try:
            shard = self._take(version, num_bytes)
        except OSError as error:
            raise StateDictError(f"no room for version {version}, {num_bytes / 1e6:.1f} MB: {error}") from error
        try:
            filled = fill(shard)
            with self._lock:
                path = self._folder_for(version).path / str(version)
                shard.publish(path)
                self._published[version] = shard
        except BaseException:
            shard.unlink()
            raise
        return path, filled

    @property
    def versions(self) -> set[int]:
        """Those that are published and not released."""
        with self._lock:
            return set(self._published)

    @property
    def shards(self) -> list[S]:
        """Those that are published, and those that later versions will be written to."""
        with self._lock:
            return [*self._published.values(), *self._spares]

    def shard_of(self, version: int) -> S:
        """That of a published version.

        Raises:
            KeyError: it is not published.
        """
        with self._lock:
            return self._published[version]

    def release(self, version: int) -> None:
        """Withdraw a version. Its memory serves the next one, or is freed once its readers are done."""
        with self._lock:
            self._retire(version)

    def close(self) -> None:
        """Free everything. What readers hold stays valid; later calls of `write` fail."""
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
        """A shard to write, that no reader has: a spare one or else a new one."""
        with self._lock:
            folder = self._folder_for(version)
            while len(self._published) >= self._keep:
                self._retire(next(iter(self._published)))
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

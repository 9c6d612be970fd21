"""CUDA IPC transport: weights for processes on the writer's host, through GPU memory."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import torch

from titan_rl.core.errors import StateDictError
from titan_rl.weights.shard_files import BLOCK_WORDS, ShardFile, ShardStore, lock_published
from titan_rl.weights.shards import assemble, fill, lay_out, size_of
from titan_rl.weights.types import NUM_KEPT, Manifest, Shard, TensorSlice

DEVICE_INDEX = 6  # position of the device among the arguments from which torch rebuilds another process's tensor


class SharedDeviceMemory(Protocol):
    """Memory of a device that another process can open."""

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Allocate a buffer.  # [num_bytes], uint8

        Raises:
            torch.OutOfMemoryError: the device has not enough free memory.
        """
        ...

    def export(self, buffer: torch.Tensor) -> Any:
        """Handle with which another process opens the buffer. It can be pickled."""
        ...

    def open(self, handle: Any) -> torch.Tensor:
        """Open the memory of another process, which stays allocated as long as the returned tensor exists."""
        ...

    def synchronize(self) -> None:
        """Wait until all copies that this thread has issued are done."""
        ...


class CudaMemory:
    """`SharedDeviceMemory` of this process's current GPU. It uses torch's exports over cudaIpcGetMemHandle, like vLLM's
    IPC weight transfer. The other process may see other GPUs than this one.

    Raises:
        StateDictError: This process has no GPU.
    """

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise StateDictError("this process has no GPU; set statedict.transport to shared_memory")

    def allocate(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device="cuda")

    def export(self, buffer: torch.Tensor) -> Any:
        from torch.multiprocessing.reductions import reduce_tensor

        _, arguments = reduce_tensor(buffer)
        return arguments

    def open(self, handle: Any) -> torch.Tensor:
        arguments = list(handle)
        arguments[DEVICE_INDEX] = torch.cuda.current_device()  # the writer may number its GPUs differently
        from torch.multiprocessing.reductions import rebuild_cuda_tensor

        return rebuild_cuda_tensor(*arguments)

    def synchronize(self) -> None:
        torch.cuda.current_stream().synchronize()


@dataclass(frozen=True, slots=True)
class ExportedBuffer:
    """A writer's buffer in a manifest. A reader keeps it open for later versions in the same buffer."""

    writer: str  # unique, also among restarts of the same rank
    slot: int  # number of the buffer
    handle: Any  # opens the buffer
    slots: tuple[int, ...]  # numbers of all buffers of the writer; readers close its other buffers


class Orphans:
    """Buffers of removed shards that readers still have open. A buffer is freed once all of them have closed it."""

    def __init__(self) -> None:
        self._buffers: list[tuple[int, torch.Tensor]] = []
        self._lock = threading.Lock()

    def add(self, file: int, buffer: torch.Tensor) -> None:
        """Keep a buffer until the readers' locks on the file are gone. Then the descriptor is closed, too."""
        with self._lock:
            self._buffers.append((file, buffer))

    def collect(self) -> None:
        with self._lock:
            self._buffers = [(file, buffer) for file, buffer in self._buffers if not self._is_free(file)]

    @staticmethod
    def _is_free(file: int) -> bool:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        os.close(file)
        return True


class DeviceShard(ShardFile):
    """A shard in device memory. Its file has no content, but the name and the locks.

    Raises:
        OSError: See `ShardFile`; also if the device has not enough free memory.
    """

    def __init__(
        self, path: Path, num_bytes: int, memory: SharedDeviceMemory, orphans: Orphans, slots: Iterator[int]
    ) -> None:
        self._memory = memory
        self._orphans = orphans
        self._slots = slots
        self.slot = -1
        self.buffer = torch.empty(0, dtype=torch.uint8)
        self.handle: Any = None
        super().__init__(path, num_bytes)

    def resize(self, num_bytes: int) -> None:
        super().resize(0)
        if num_bytes == len(self.buffer):
            return
        self._orphans.collect()
        self.buffer = torch.empty(0, dtype=torch.uint8)  # there may be no memory for both buffers
        try:
            self.buffer = self._memory.allocate(num_bytes)
        except torch.OutOfMemoryError as error:
            raise OSError(errno.ENOMEM, str(error)) from error
        self.handle = self._memory.export(self.buffer)
        self.slot = next(self._slots)

    def reclaim(self) -> bool:
        self._orphans.collect()
        return super().reclaim()

    def unlink(self) -> None:
        self._orphans.add(os.dup(self._file), self.buffer)
        super().unlink()
        self._orphans.collect()


class DeviceShardStore(ShardStore[DeviceShard]):
    """Store of shards in device memory."""

    def __init__(self, run_id: str, memory: SharedDeviceMemory, *, keep: int, root: Path | None) -> None:
        super().__init__(run_id, keep=keep, root=root)
        self._memory = memory
        self._orphans = Orphans()
        self._slots = count()

    def _make(self, path: Path, num_bytes: int) -> DeviceShard:
        return DeviceShard(path, num_bytes, self._memory, self._orphans, self._slots)


class ReadLock:
    """Reader's lock on a published shard, which is not written to until the lock is closed or garbage-collected.

    Raises:
        StateDictError: The shard is gone.
    """

    def __init__(self, path: Path) -> None:
        self._file: int | None = None
        self._file = lock_published(path)

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    __del__ = close


class CudaIPCTransport:
    """`StateDictTransport` for readers on GPUs of the writer's host: weights never pass through the host's memory.

    A writer keeps its own slices of `keep` versions on its GPU, in the published dtype. A reader copies one tensor at a
    time from the writer's memory to its own GPU, and holds the version until it has copied the last tensor.

    Args:
        run_id, keep, root: See `ShardStore`.
        memory: Memory to use; by default that of the current GPU.

    Raises:
        StateDictError: This process has no GPU.
        ValueError: See `ShardStore`.
    """

    def __init__(
        self, run_id: str, *, keep: int = NUM_KEPT, root: Path | None = None, memory: SharedDeviceMemory | None = None
    ) -> None:
        self._memory = memory or CudaMemory()
        self._opened: dict[tuple[str, int], torch.Tensor] = {}  # other writers' buffers, by writer and slot
        self._lock = threading.Lock()
        self._store = DeviceShardStore(run_id, self._memory, keep=keep, root=root)

    def publish(self, version: int, named_tensors: Iterable[tuple[str, torch.Tensor | TensorSlice]]) -> Manifest:
        """Copy the tensors into a shard on the GPU and make it visible.

        Raises:
            StateDictError: The version is published already, a tensor or a slice of it appears twice, there is not
                enough memory, or the transport is closed. Nothing of the version is left.
        """
        named = list(named_tensors)
        entries = lay_out(named)
        num_bytes = size_of(entries)
        with self._store.writing(version, num_bytes) as shard:
            fill(shard.buffer, named, entries)
            found = checksum(shard.buffer)  # waits for the copies
        slots = tuple(sorted({each.slot for each in self._store.shards} | {shard.slot}))
        exported = ExportedBuffer(str(shard.path.parent), shard.slot, shard.handle, slots)
        return Manifest(version, (Shard(str(shard.path), num_bytes, found, entries, remote=exported),))

    def pull(self, manifest: Manifest) -> Iterator[tuple[str, torch.Tensor]]:
        """Verify every shard, then yield (name, tensor) pairs, each a copy on this process's GPU.

        The first tensor may be used at once by any thread, on any stream. Each later one is copied on the current
        stream of the thread that takes it.

        Raises:
            StateDictError: A shard of the version is gone, its size, layout or checksum differs from the manifest's, or
                the slices of a tensor do not make it up.
        """
        locks: list[ReadLock] = []
        self._close_stale(manifest)

        def open_shard(shard: Shard) -> torch.Tensor:
            if not shard.num_bytes:
                return torch.empty(0, dtype=torch.uint8)
            locks.append(ReadLock(Path(shard.location)))
            return self._open(shard)

        try:
            pairs = assemble(manifest, open_shard, copy=True)
        except BaseException:
            _close(locks)  # the traceback would keep them open
            raise
        return self._until_read(pairs, locks)

    def hold(self, version: int | None) -> None:
        """Keep a version in addition to the newest ones; see `ShardStore.hold`."""
        self._store.hold(version)

    def release(self, version: int) -> None:
        """Withdraw a version. Its memory is reused for the next one, or freed once its readers are done."""
        self._store.release(version)

    def close(self) -> None:
        """Free all buffers that no reader has open; later calls of `publish` fail."""
        self._store.close()
        with self._lock:
            self._opened.clear()

    def _open(self, shard: Shard) -> torch.Tensor:
        try:
            buffer = self._buffer(shard.remote)
            found = checksum(buffer) if len(buffer) == shard.num_bytes else None
        except RuntimeError as error:  # raised by CUDA
            raise StateDictError(f"the GPU memory of {shard.location} cannot be read: {error}") from error
        if found is None:
            raise StateDictError(f"{shard.location} has {len(buffer)} bytes, but its manifest says {shard.num_bytes}")
        if found != shard.checksum:
            raise StateDictError(
                f"{shard.location} has checksum {found:#010x}, but its manifest says {shard.checksum:#010x}"
            )
        return buffer

    def _buffer(self, exported: ExportedBuffer) -> torch.Tensor:
        """A writer's buffer, opened at most once."""
        key = exported.writer, exported.slot
        with self._lock:
            if key not in self._opened:
                self._opened[key] = self._memory.open(exported.handle)
            return self._opened[key]

    def _close_stale(self, manifest: Manifest) -> None:
        """Close buffers that their writer no longer uses, because an open buffer keeps the memory allocated."""
        exported: list[ExportedBuffer] = [shard.remote for shard in manifest.shards]
        kept = {(each.writer, slot) for each in exported for slot in each.slots}
        with self._lock:
            self._opened = {key: buffer for key, buffer in self._opened.items() if key in kept}

    def _until_read(
        self, pairs: Iterator[tuple[str, torch.Tensor]], locks: list[ReadLock]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        try:
            for first in pairs:
                self._memory.synchronize()  # the engine may read the tensor on another stream than that of the copy
                yield first
                break
            yield from pairs
        finally:
            self._memory.synchronize()
            _close(locks)


def _close(locks: Iterable[ReadLock]) -> None:
    for lock in locks:
        lock.close()


def checksum(buffer: torch.Tensor) -> int:
    """Compute the checksum of `titan_rl.weights.shard_files.checksum` on the device that holds the bytes.

    Args:
        buffer: Bytes, whose number is a multiple of 8.  # [num_bytes], uint8
    """
    if not len(buffer):
        return zlib.crc32(b"")
    words = buffer.view(torch.int64)
    end = len(words) - len(words) % BLOCK_WORDS
    sums = torch.cat([words[:end].view(-1, BLOCK_WORDS).sum(1), words[end:].sum().view(-1)[: len(words) - end]])
    return zlib.crc32(sums.cpu().numpy().tobytes())

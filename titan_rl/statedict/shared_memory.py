"""Weights from one process to the others of its host, through shared memory."""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from mmap import mmap
from pathlib import Path
from types import TracebackType

import numpy as np
import torch
from numpy.typing import NDArray

from titan_rl.errors import StateDictError
from titan_rl.owned_folder import OwnedFolder
from titan_rl.statedict.folder import clean_dead_segments, segment_folder
from titan_rl.statedict.segment import ALIGNMENT, Segment, checksum, map_segment
from titan_rl.statedict.types import Manifest, Probe, TensorEntry

with warnings.catch_warnings():  # torch says once a process that it cannot guard read-only memory, which is understood
    warnings.simplefilter("ignore")
    torch.frombuffer(b"\0", dtype=torch.uint8)


class SharedMemoryTransport:
    """`StateDictTransport` for readers on the writer's host.

    One memory-mapped file a version, in a folder of the writer's own under /dev/shm that is made at the first publish.
    Writing happens under a hidden name and a rename publishes, so a version is whole or absent. A reader gets views of
    the mapping, not copies; they stay valid, and unchanged, after the version is released, and writing to one ends the
    process. All methods may be called from any thread; a reader calls only `pull`, on an instance of its own.

    Args:
        run_id: part of the folder's name.
        keep: most versions at a time, the one being written included; publishing one more releases the oldest. With 2
            the memory is double-buffered: readers have the last version while the next is written over the one before.
        root: where the folder is made; by default /dev/shm, or the temporary folder where there is none.

    Example:
        with SharedMemoryTransport("run-7") as transport:
            manifest = transport.publish(1, model.state_dict().items())
            ...  # elsewhere on the host, given the manifest
            engine.load_state_dict(SharedMemoryTransport("run-7").pull(manifest), version=1)

    Raises:
        ValueError: `run_id` is no plain file name, or `keep` is below 1.
    """

    def __init__(self, run_id: str, *, keep: int = 2, root: Path | None = None) -> None:
        if not run_id or "/" in run_id or "\0" in run_id:
            raise ValueError(f"run_id is {run_id!r}; it becomes part of a folder's name and must be a plain file name")
        if keep < 1:
            raise ValueError(f"keep is {keep}; at least 1 version must be kept")
        self._run_id = run_id
        self._keep = keep
        self._root = root
        self._folder: OwnedFolder | None = None
        self._published: dict[int, Segment] = {}  # oldest first
        self._spares: list[Segment] = []  # released, to be written again
        self._names = count()
        self._lock = threading.Lock()  # of the fields above; not held while bytes are copied
        self._closed = False

    def publish(
        self,
        version: int,
        named_tensors: Iterable[tuple[str, torch.Tensor]],
        *,
        probes: Sequence[Probe] = (),
        tolerance: float = 1e-5,
    ) -> Manifest:
        """Copy the tensors, from whatever device, into a segment and make it visible.

        Raises:
            StateDictError: the version is published already, a name appears twice, there is no room, or the transport
                is closed. Nothing of the version is left then.
        """
        tensors = list(named_tensors)
        entries = _layout(tensors)
        num_bytes = _align(entries[-1].offset + entries[-1].num_bytes) if entries else 0
        try:
            segment = self._take_segment(version, num_bytes)
        except OSError as error:
            raise StateDictError(f"no room for version {version}, {num_bytes / 1e6:.1f} MB: {error}") from error
        try:
            _copy(tensors, entries, segment)
            found = checksum(segment.data)
            with self._lock:
                path = self._folder_for(version).path / str(version)
                segment.publish(path)
                self._published[version] = segment
        except BaseException:
            segment.unlink()
            raise
        return Manifest(version, str(path), num_bytes, found, entries, tuple(probes), tolerance)

    def pull(self, manifest: Manifest) -> Iterator[tuple[str, torch.Tensor]]:
        """Verify the segment, then give (name, view) pairs. The checks are done when this returns.

        Raises:
            StateDictError: the version is gone, or its size, layout or checksum differ from the manifest's.
        """
        return views(manifest, map_segment(Path(manifest.location), manifest.num_bytes, manifest.checksum))

    @property
    def versions(self) -> set[int]:
        """Those that are published and not released."""
        with self._lock:
            return set(self._published)

    def bytes_of(self, version: int) -> NDArray[np.uint8]:
        """The memory of a published version.  # [num_bytes]

        Raises:
            KeyError: it is not published.
        """
        with self._lock:
            return self._published[version].data

    def release(self, version: int) -> None:
        """Withdraw a version. Its memory serves the next one, or is freed once its readers are done."""
        with self._lock:
            self._retire(version)

    def close(self) -> None:
        """Free everything. Views that readers hold stay valid; later calls of `publish` fail."""
        with self._lock:
            self._closed = True
            for segment in [*self._published.values(), *self._spares]:
                segment.unlink()
            self._published.clear()
            self._spares.clear()
            if self._folder is not None:
                self._folder.remove()
                self._folder = None

    def __enter__(self) -> SharedMemoryTransport:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _folder_for(self, version: int) -> OwnedFolder:
        if self._closed:
            raise StateDictError(f"version {version} cannot be published: the transport is closed")
        if version in self._published:
            raise StateDictError(f"version {version} is published already; release it first")
        if self._folder is None:
            clean_dead_segments(self._root)
            self._folder = segment_folder(self._run_id, self._root)
        return self._folder

    def _take_segment(self, version: int, num_bytes: int) -> Segment:
        """A segment to write, that no reader has mapped: a spare one or else a new one."""
        with self._lock:
            folder = self._folder_for(version)
            while len(self._published) >= self._keep:
                self._retire(next(iter(self._published)))
            while self._spares:
                segment = self._spares.pop(0)
                try:
                    if segment.reclaim():
                        segment.resize(num_bytes)
                        return segment
                except BaseException:
                    segment.unlink()
                    raise
                segment.unlink()
            return Segment(self._hidden_name(folder), num_bytes)

    def _retire(self, version: int) -> None:
        segment = self._published.pop(version, None)
        if segment is None:
            return
        assert self._folder is not None
        if len(self._published) + len(self._spares) < self._keep:
            segment.rename(self._hidden_name(self._folder))
            self._spares.append(segment)
        else:
            segment.unlink()

    def _hidden_name(self, folder: OwnedFolder) -> Path:
        return folder.path / f".{next(self._names)}"


def _align(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _layout(tensors: list[tuple[str, torch.Tensor]]) -> tuple[TensorEntry, ...]:
    """The tensors one after the other, each at a multiple of `ALIGNMENT`."""
    entries: dict[str, TensorEntry] = {}
    offset = 0
    for name, tensor in tensors:
        if name in entries:
            raise StateDictError(f"{name!r} appears twice in the state dict")
        dtype = str(tensor.dtype).removeprefix("torch.")
        entries[name] = TensorEntry(name, dtype, tuple(tensor.shape), offset, tensor.numel() * tensor.itemsize)
        offset = _align(offset + entries[name].num_bytes)
    return tuple(entries.values())


@torch.no_grad()
def _copy(tensors: list[tuple[str, torch.Tensor]], entries: tuple[TensorEntry, ...], segment: Segment) -> None:
    for (_, tensor), entry in zip(tensors, entries, strict=True):
        end = entry.offset + entry.num_bytes
        if entry.num_bytes:
            if tensor.device.type == "cpu" and tensor.is_contiguous():
                segment.data[entry.offset : end] = tensor.detach().view(-1).view(torch.uint8).numpy()
            else:
                _view(segment.data, entry).copy_(tensor)
        segment.data[end : _align(end)] = 0  # a used segment has old bytes there, which the checksum would see


def _view(buffer: mmap | NDArray[np.uint8], entry: TensorEntry) -> torch.Tensor:
    dtype = getattr(torch, entry.dtype)
    numel = math.prod(entry.shape)
    if numel == 0:
        return torch.empty(entry.shape, dtype=dtype)
    return torch.frombuffer(buffer, dtype=dtype, count=numel, offset=entry.offset).view(entry.shape)


def views(manifest: Manifest, buffer: mmap | NDArray[np.uint8]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a version, as views of its bytes.

    Raises:
        StateDictError: the manifest describes a tensor that does not fit them.
    """
    for entry in manifest.entries:
        _check_entry(entry, manifest)
    return ((entry.name, _view(buffer, entry)) for entry in manifest.entries)


def _check_entry(entry: TensorEntry, manifest: Manifest) -> None:
    dtype = getattr(torch, entry.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise StateDictError(f"{entry.name!r} of version {manifest.version} has unknown dtype {entry.dtype!r}")
    fits = entry.offset >= 0 and entry.offset + entry.num_bytes <= manifest.num_bytes
    if not fits or math.prod(entry.shape) * dtype.itemsize != entry.num_bytes:
        raise StateDictError(f"{entry.name!r} does not fit the {manifest.num_bytes} bytes of its manifest: {entry}")

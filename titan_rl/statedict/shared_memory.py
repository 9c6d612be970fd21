"""Weights from one process to the others of its host, through shared memory."""

from __future__ import annotations

import threading
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
from titan_rl.statedict.assembly import assemble, view
from titan_rl.statedict.folder import clean_dead_segments, segment_folder
from titan_rl.statedict.segment import ALIGNMENT, Segment, checksum, map_segment
from titan_rl.statedict.types import Manifest, Part, Probe, TensorEntry, TensorSlice


class SharedMemoryTransport:
    """`StateDictTransport` for readers on the writer's host.

    One memory-mapped file a version, in a folder of the writer's own under /dev/shm that is made at the first publish.
    Writing happens under a hidden name and a rename publishes, so a version is whole or absent. A reader gets views of
    the mapping, not copies, of every tensor that one part has whole; they stay valid, and unchanged, after the version
    is released, and writing to one ends the process. All methods may be called from any thread; a reader calls only
    `pull`, on an instance of its own.

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
        named_tensors: Iterable[tuple[str, torch.Tensor | TensorSlice]],
        *,
        probes: Sequence[Probe] = (),
        tolerance: float = 1e-5,
    ) -> Manifest:
        """Copy the tensors, from whatever device, into a segment and make it visible.

        Raises:
            StateDictError: the version is published already, a tensor or a slice of it appears twice, there is no
                room, or the transport is closed. Nothing of the version is left then.
        """
        named = list(named_tensors)
        entries = _layout(named)
        num_bytes = _align(entries[-1].offset + entries[-1].num_bytes) if entries else 0
        try:
            segment = self._take_segment(version, num_bytes)
        except OSError as error:
            raise StateDictError(f"no room for version {version}, {num_bytes / 1e6:.1f} MB: {error}") from error
        try:
            _copy(named, entries, segment)
            found = checksum(segment.data)
            with self._lock:
                path = self._folder_for(version).path / str(version)
                segment.publish(path)
                self._published[version] = segment
        except BaseException:
            segment.unlink()
            raise
        return Manifest(version, (Part(str(path), num_bytes, found, entries),), tuple(probes), tolerance)

    def pull(self, manifest: Manifest) -> Iterator[tuple[str, torch.Tensor]]:
        """Verify every part, then give (name, tensor) pairs. The checks are done when this returns.

        Raises:
            StateDictError: a part of the version is gone, its size, layout or checksum differ from the manifest's, or
                the slices of a tensor do not make it up.
        """
        return assemble(manifest, map_part)

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


def map_part(part: Part) -> mmap:
    """As `map_segment`."""
    return map_segment(Path(part.location), part.num_bytes, part.checksum)


def _layout(named: list[tuple[str, torch.Tensor | TensorSlice]]) -> tuple[TensorEntry, ...]:
    """The tensors one after the other, each at a multiple of `ALIGNMENT`."""
    entries: dict[tuple[str, tuple[int, ...] | None], TensorEntry] = {}
    offset = 0
    for name, value in named:
        tensor, place = (value.tensor, value.place) if isinstance(value, TensorSlice) else (value, None)
        shape = tuple(tensor.shape)
        if place is not None and shape == place.whole_shape and not any(place.start):
            place = None
        key = (name, None if place is None else place.start)
        if key in entries:
            raise StateDictError(f"{name!r} appears twice in the state dict")
        dtype = str(tensor.dtype).removeprefix("torch.")
        entries[key] = TensorEntry(name, dtype, shape, offset, tensor.numel() * tensor.itemsize, place)
        offset = _align(offset + entries[key].num_bytes)
    return tuple(entries.values())


@torch.no_grad()
def _copy(
    named: list[tuple[str, torch.Tensor | TensorSlice]], entries: tuple[TensorEntry, ...], segment: Segment
) -> None:
    for (_, value), entry in zip(named, entries, strict=True):
        tensor = value.tensor if isinstance(value, TensorSlice) else value
        end = entry.offset + entry.num_bytes
        if entry.num_bytes:
            if tensor.device.type == "cpu" and tensor.is_contiguous():
                segment.data[entry.offset : end] = tensor.detach().view(-1).view(torch.uint8).numpy()
            else:
                view(segment.data, entry).copy_(tensor)
        segment.data[end : _align(end)] = 0  # a used segment has old bytes there, which the checksum would see

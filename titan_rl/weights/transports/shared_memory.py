"""Weights from one process to the others of its host, through shared memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType

import numpy as np
import torch
from numpy.typing import NDArray

from titan_rl.weights.shard_files import RunningChecksum, ShardFile, ShardReader, ShardStore
from titan_rl.weights.shards import assemble, fill, lay_out, size_of
from titan_rl.weights.types import NUM_KEPT, Manifest, Probe, Shard, TensorSlice


class SharedMemoryTransport:
    """`StateDictTransport` for readers on the writer's host.

    One memory-mapped file a version. A reader gets views of the mapping, not copies, of every tensor that one shard has
    whole; they stay valid, and unchanged, after the version is released, and writing to one ends the process. All
    methods may be called from any thread; a reader calls only `pull`, on an instance of its own, which it keeps: the
    second time round a shard's file need not be mapped again.

    Args:
        run_id, keep, root: as of `ShardStore`.

    Example:
        with SharedMemoryTransport("run-7") as transport:
            manifest = transport.publish(1, model.state_dict().items())
            ...  # elsewhere on the host, given the manifest
            engine.load_state_dict(SharedMemoryTransport("run-7").pull(manifest), version=1)

    Raises:
        ValueError: `run_id` is no plain file name, or `keep` is below 1.
    """

    def __init__(self, run_id: str, *, keep: int = NUM_KEPT, root: Path | None = None) -> None:
        self._store = ShardStore(run_id, ShardFile, keep=keep, root=root)
        self._reader = ShardReader()

    def publish(
        self,
        version: int,
        named_tensors: Iterable[tuple[str, torch.Tensor | TensorSlice]],
        *,
        probes: Sequence[Probe] = (),
        tolerance: float = 1e-5,
    ) -> Manifest:
        """Copy the tensors, from whatever device, into a shard and make it visible.

        Raises:
            StateDictError: the version is published already, a tensor or a slice of it appears twice, there is no
                room, or the transport is closed. Nothing of the version is left then.
        """
        named = list(named_tensors)
        entries = lay_out(named)
        num_bytes = size_of(entries)

        def write(shard: ShardFile) -> int:
            sums = RunningChecksum(shard.data)
            fill(shard.data, named, entries, sums.written)
            return sums.value()

        path, found = self._store.write(version, num_bytes, write)
        return Manifest(version, (Shard(str(path), num_bytes, found, entries),), tuple(probes), tolerance)

    def pull(self, manifest: Manifest) -> Iterator[tuple[str, torch.Tensor]]:
        """Verify every shard, then give (name, tensor) pairs. The checks are done when this returns.

        Raises:
            StateDictError: a shard of the version is gone, its size, layout or checksum differ from the manifest's, or
                the slices of a tensor do not make it up.
        """
        return assemble(manifest, self.open_shard)

    def open_shard(self, shard: Shard) -> NDArray[np.uint8]:
        """Open a shard; see `ShardReader.open`."""
        return self._reader.open(Path(shard.location), shard.num_bytes, shard.checksum)

    @property
    def versions(self) -> set[int]:
        """Versions that are published and not released."""
        return self._store.versions

    def bytes_of(self, version: int) -> NDArray[np.uint8]:
        """The memory of a published version.  # [num_bytes]

        Raises:
            KeyError: it is not published.
        """
        return self._store.shard_of(version).data

    def release(self, version: int) -> None:
        """Withdraw a version. Its memory serves the next one, or is freed once its readers are done."""
        self._store.release(version)

    def close(self) -> None:
        """Free everything. Views that readers hold stay valid; later calls of `publish` fail."""
        self._store.close()

    def __enter__(self) -> SharedMemoryTransport:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

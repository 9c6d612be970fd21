"""Shared-memory transport: weights for processes on the writer's host."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from titan_rl.weights.shard_files import FileShardStore, ShardReader
from titan_rl.weights.shards import assemble, fill_and_sum, lay_out, size_of
from titan_rl.weights.types import NUM_KEPT, Manifest, Shard, TensorSlice


class SharedMemoryTransport:
    """`StateDictTransport` for readers on the writer's host.

    Each version is one memory-mapped file. For every tensor that one shard has whole, a reader gets a view of the
    mapping, not a copy. Views stay valid and unchanged after the version is released; writing to a view ends the
    process. All methods may be called from any thread. A reader calls only `pull`, on its own instance, which it keeps
    so that reused files need not be mapped again.

    Args:
        run_id, keep, root: See `ShardStore`.

    Example:
        with SharedMemoryTransport("run-7") as transport:
            manifest = transport.publish(1, model.state_dict().items())
            ...  # elsewhere on the host, given the manifest
            engine.load_state_dict(SharedMemoryTransport("run-7").pull(manifest), version=1)

    Raises:
        ValueError: `run_id` is not a plain file name, or `keep` is below 1.
    """

    def __init__(self, run_id: str, *, keep: int = NUM_KEPT, root: Path | None = None) -> None:
        self._store = FileShardStore(run_id, keep=keep, root=root)
        self._reader = ShardReader()

    def publish(self, version: int, named_tensors: Iterable[tuple[str, torch.Tensor | TensorSlice]]) -> Manifest:
        """Copy the tensors, from any device, into a shard and make it visible.

        Raises:
            StateDictError: The version is published already, a tensor or a slice of it appears twice, there is no
                space, or the transport is closed. Nothing of the version is left.
        """
        named = list(named_tensors)
        entries = lay_out(named)
        num_bytes = size_of(entries)
        with self._store.writing(version, num_bytes) as shard:
            checksum = fill_and_sum(shard.data, named, entries)
        return Manifest(version, (Shard(str(shard.path), num_bytes, checksum, entries),))

    def pull(self, manifest: Manifest) -> Iterator[tuple[str, torch.Tensor]]:
        """Verify every shard, and return an iterator of (name, tensor) pairs.

        Raises:
            StateDictError: A shard of the version is gone, its size, layout or checksum differs from the manifest's, or
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
            KeyError: The version is not published.
        """
        return self._store.shard_of(version).data

    def hold(self, version: int | None) -> None:
        """Keep a version in addition to the newest ones; see `ShardStore.hold`."""
        self._store.hold(version)

    def release(self, version: int) -> None:
        """Withdraw a version. Its memory is reused for the next one, or freed once its readers are done."""
        self._store.release(version)

    def close(self) -> None:
        """Free everything. Views of readers stay valid; later calls of `publish` fail."""
        self._store.close()

    def __enter__(self) -> SharedMemoryTransport:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def is_on_host(shard: Shard, host: str) -> bool:
    """Whether processes of a host can map a shard."""
    return shard.remote is None or (shard.host == host and Path(shard.location).exists())

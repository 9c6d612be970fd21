"""Copy of a shard on this host, readable while it still grows."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from titan_rl.core.errors import StateDictError
from titan_rl.weights.relay.delta import ChunkDelta, chunk_size


class ShardCopy:
    """The bytes of a shard, of which the first `ready` chunks are final. One thread fills the chunks; any number of
    threads may wait for them.

    Args:
        version: Version of the shard.
        data: Memory of the shard.  # [num_bytes]
    """

    def __init__(self, version: int, data: NDArray[np.uint8]) -> None:
        self.version = version
        self.data = data
        self.chunk_bytes = chunk_size(len(data))
        self.num_chunks = -(-len(data) // self.chunk_bytes)
        self._ready = 0
        self._chains: dict[int, tuple[ChunkDelta, ...]] = {}  # deltas by chunk, each to the base of the next
        self._problem: str | None = None
        self._changed = threading.Condition()

    @property
    def ready(self) -> int:
        """Number of final chunks, from the start."""
        return self._ready

    @property
    def is_complete(self) -> bool:
        return self._ready == self.num_chunks

    def chunk(self, index: int) -> NDArray[np.uint8]:
        """The memory of a chunk."""
        return self.data[index * self.chunk_bytes : (index + 1) * self.chunk_bytes]

    def add(self, deltas: Sequence[ChunkDelta] = (), base: ShardCopy | None = None) -> None:
        """Mark the next chunk as ready, and keep the deltas from which readers of older versions can compute it.

        Args:
            deltas: Deltas from the chunk of an older version to this one, in order; empty if only the whole chunk is
                known.
            base: Copy of that older version. The deltas that lead to it are also kept, newest first, as long as all
                together have fewer bytes than the chunk.
        """
        with self._changed:
            if deltas:
                older = () if base is None else base._chains.get(self._ready, ())
                size, most = sum(len(each.encoded) for each in deltas), len(self.chunk(self._ready))
                kept = len(older)
                while kept and size + len(older[kept - 1].encoded) < most:
                    kept -= 1
                    size += len(older[kept].encoded)
                self._chains[self._ready] = (*older[kept:], *deltas)
            self._ready += 1
            self._changed.notify_all()

    def complete(self) -> None:
        """Mark all chunks as ready."""
        with self._changed:
            self._ready = self.num_chunks
            self._changed.notify_all()

    def withdraw(self, problem: str) -> None:
        """Fail all readers, with the reason."""
        with self._changed:
            self._problem = self._problem or problem
            self._changed.notify_all()

    def wait_for(self, index: int, timeout_s: float) -> bool:
        """Wait for a chunk. Returns whether it is ready within `timeout_s` seconds.

        Raises:
            StateDictError: The copy has been withdrawn.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._ready > index or self._problem is not None, timeout_s)
            if self._problem is not None:
                raise StateDictError(self._problem)
            return self._ready > index

    def deltas(self, index: int, base: int | None) -> tuple[ChunkDelta, ...]:
        """Deltas from the chunk of version `base` to this final chunk; empty if they are not known."""
        chain = self._chains.get(index, ())
        return next((chain[at:] for at, delta in enumerate(chain) if delta.base == base), ())

    def follows(self, base: int) -> bool:
        """Whether readers of version `base` can receive at least one chunk as deltas."""
        return base == self.version or any(self.deltas(index, base) for index in self._chains)

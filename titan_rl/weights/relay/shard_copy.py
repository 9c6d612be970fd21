"""A shard of one version as far as it is on this host, which others may read while it still grows."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from titan_rl.core.errors import StateDictError

_SMALLEST, _LARGEST = 1 << 20, 16 << 20  # bytes of a chunk
_CHUNKS = 512  # of a shard between the two: a chain of few hosts takes hardly longer than one


def chunk_size(num_bytes: int) -> int:
    """Bytes of every chunk of such a shard but the last; the same on all hosts."""
    return min(max(-(-num_bytes // _CHUNKS // 4096) * 4096, _SMALLEST), _LARGEST)


@dataclass(frozen=True, slots=True)
class ChunkDelta:
    """How a chunk comes of the same chunk of `base`."""

    base: int  # version
    encoded: bytes
    crc: int

    @classmethod
    def of(cls, base: int, encoded: bytes) -> ChunkDelta:
        return cls(base, encoded, zlib.crc32(encoded))


class ShardCopy:
    """The bytes of a shard, of which a number of chunks from the start are what they will be. One thread makes them
    ready, any number waits for them.

    Args:
        data: where they are, or will be.  # [num_bytes]
    """

    def __init__(self, version: int, data: NDArray[np.uint8]) -> None:
        self.version = version
        self.data = data
        self.chunk_bytes = chunk_size(len(data))
        self.num_chunks = -(-len(data) // self.chunk_bytes)
        self._ready = 0
        self._chains: dict[int, tuple[ChunkDelta, ...]] = {}  # by chunk: deltas, each to the base of the next
        self._problem: str | None = None
        self._changed = threading.Condition()

    @property
    def ready(self) -> int:
        """Chunks from the start."""
        return self._ready

    @property
    def is_whole(self) -> bool:
        return self._ready == self.num_chunks

    def chunk(self, index: int) -> NDArray[np.uint8]:
        """The memory of a chunk."""
        return self.data[index * self.chunk_bytes : (index + 1) * self.chunk_bytes]

    def add(self, deltas: Sequence[ChunkDelta] = (), base: ShardCopy | None = None) -> None:
        """Mark the next chunk as ready, and keep the deltas by which readers of older versions get it.

        Args:
            deltas: steps from the chunk of an older version to this one, in order; none where only the whole is known.
            base: the copy of that older version. The steps that it was made by are kept, too, newest first, as long as
                all together are fewer bytes than the chunk.
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
        """All of it is ready."""
        with self._changed:
            self._ready = self.num_chunks
            self._changed.notify_all()

    def withdraw(self, problem: str) -> None:
        """Nobody is to read it any more."""
        with self._changed:
            self._problem = self._problem or problem
            self._changed.notify_all()

    def wait_for(self, index: int, timeout_s: float) -> bool:
        """Whether the chunk is ready within that time.

        Raises:
            StateDictError: it is withdrawn.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._ready > index or self._problem is not None, timeout_s)
            if self._problem is not None:
                raise StateDictError(self._problem)
            return self._ready > index

    def deltas(self, index: int, base: int | None) -> tuple[ChunkDelta, ...]:
        """The steps to a chunk that is ready from that of version `base`; none where they are not known."""
        chain = self._chains.get(index, ())
        return next((chain[at:] for at, delta in enumerate(chain) if delta.base == base), ())

    def follows(self, base: int) -> bool:
        """Whether readers of version `base` need less than the whole of this one."""
        return base == self.version or any(self.deltas(index, base) for index in self._chains)

"""Copy of a shard on this host, readable while it still grows, and the deltas between chunks of two versions.

After a step in bfloat16 few numbers change, mostly by one or two units in the last place. A delta contains the gaps
between changed words, and their differences as zigzag-encoded integers, compressed with zstd."""

from __future__ import annotations

import struct
import threading
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from titan_rl.core.errors import StateDictError

_HEADER = struct.Struct("<BBI")  # bytes of a word, bytes of a gap, number of changed words
_SIGNED = {2: np.int16, 4: np.int32}
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32}
MOST_CHANGED = 0.5  # largest share of changed words, or of the chunk's bytes, for which a delta is worthwhile


def encode_delta(old: NDArray[np.uint8], new: NDArray[np.uint8], word: int) -> bytes | None:
    """Encode the difference of `new` from `old`; None if the delta would not be much smaller than `new`.

    Args:
        old, new: Chunks of the same size, a multiple of 4 bytes.  # [num_bytes]
        word: Size of a number in bytes, 2 or 4.
    """
    before, after = old.view(_SIGNED[word]), new.view(_SIGNED[word])
    at = np.flatnonzero(before != after)
    if not len(at):
        return _HEADER.pack(word, 1, 0)
    if len(at) > MOST_CHANGED * len(before):
        return None
    gaps = np.diff(at, prepend=-1) - 1
    largest = int(gaps.max())
    gap = 1 if largest < 1 << 8 else 2 if largest < 1 << 16 else 4
    difference = after[at] - before[at]  # wraps around, like the addition in `apply_delta`
    zigzag = (difference << 1) ^ (difference >> (8 * word - 1))
    body = _planes(gaps.astype(_UNSIGNED[gap])) + _planes(zigzag)
    encoded = _HEADER.pack(word, gap, len(at)) + zstandard.ZstdCompressor(level=1).compress(body)
    return encoded if len(encoded) < MOST_CHANGED * len(new) else None


def apply_delta(encoded: bytes, data: NDArray[np.uint8]) -> None:
    """Turn the old chunk into the new one, in place.

    Raises:
        StateDictError: The bytes are not a delta of such a chunk; `data` is unchanged.
    """
    try:
        word, gap, count = _HEADER.unpack_from(encoded)
        if not count:
            return
        signed, unsigned = _SIGNED[word], _UNSIGNED[gap]
        size = count * (gap + word)
        body = zstandard.ZstdDecompressor().decompress(encoded[_HEADER.size :], max_output_size=size)
        if len(body) != size or word * count > len(data):
            raise ValueError(f"{len(body)} bytes for {count} changes of {len(data)} bytes")
        gaps = _words(body[: count * gap], unsigned).astype(np.int64)
        at = np.cumsum(gaps + 1) - 1
        words = data.view(signed)
        if at[-1] >= len(words):
            raise ValueError(f"word {at[-1]} of {len(words)} changes")
        zigzag = _words(body[count * gap :], signed)
        magnitude = (zigzag.view(_UNSIGNED[word]) >> 1).view(signed)
        words[at] += magnitude ^ -np.bitwise_and(zigzag, 1)
    except (ValueError, KeyError, struct.error, zstandard.ZstdError) as error:
        raise StateDictError(f"a delta of weights is damaged: {error}") from error


def _planes(words: NDArray[np.integer[Any]]) -> bytes:
    """All lowest bytes of the words, then all second-lowest ones, and so on. The highest bytes are nearly all 0, which
    compresses well."""
    return words.view(np.uint8).reshape(len(words), -1).T.tobytes()


def _words(planes: bytes, dtype: type[np.integer[Any]]) -> NDArray[np.integer[Any]]:
    size = np.dtype(dtype).itemsize
    return np.ascontiguousarray(np.frombuffer(planes, np.uint8).reshape(size, -1).T).reshape(-1).view(dtype)


_SMALLEST, _LARGEST = 1 << 20, 16 << 20  # smallest and largest size of a chunk in bytes
_CHUNKS = 512  # chunks of a shard between these limits: a chain of few hosts takes hardly longer than one host


def chunk_size(num_bytes: int) -> int:
    """Size in bytes of every chunk but the last of a shard of `num_bytes`; the same on all hosts."""
    return min(max(-(-num_bytes // _CHUNKS // 4096) * 4096, _SMALLEST), _LARGEST)


@dataclass(frozen=True, slots=True)
class ChunkDelta:
    """Delta from a chunk of version `base` to the same chunk of a newer one."""

    base: int  # version
    encoded: bytes
    crc: int

    @classmethod
    def of(cls, base: int, encoded: bytes) -> ChunkDelta:
        return cls(base, encoded, zlib.crc32(encoded))


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

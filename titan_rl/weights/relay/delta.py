"""Deltas between a chunk of a shard and the same chunk of a newer version.

After a step in bfloat16 few numbers change, mostly by one or two units in the last place. A delta contains the gaps
between changed words, and their differences as zigzag-encoded integers, compressed with zstd."""

from __future__ import annotations

import struct
import zlib
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

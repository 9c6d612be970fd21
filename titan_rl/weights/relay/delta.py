"""What changed between two chunks of weights, to the bit, in few bytes.

Of a step in bfloat16 few numbers change, and those by a unit or two in the last place. A delta says how far apart the
changed words lie, and by how much each differs as an integer, small numbers first; zstd does the rest.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from titan_rl.core.errors import StateDictError

_HEADER = struct.Struct("<BBI")  # bytes of a word, bytes of a gap, number of changed words
_SIGNED = {2: np.int16, 4: np.int32}
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32}
MOST_CHANGED = 0.5  # of the words; above that a delta is not worth its making


def encode(old: NDArray[np.uint8], new: NDArray[np.uint8], word: int) -> bytes | None:
    """The delta by which `old` becomes `new`, or None where `new` itself is not much larger.

    Args:
        old, new: of the same size, a multiple of 4 bytes.
        word: bytes of a number, 2 or 4.
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
    difference = after[at] - before[at]  # wraps, and so does adding it
    zigzag = (difference << 1) ^ (difference >> (8 * word - 1))
    body = _planes(gaps.astype(_UNSIGNED[gap])) + _planes(zigzag)
    encoded = _HEADER.pack(word, gap, len(at)) + zstandard.ZstdCompressor(level=1).compress(body)
    return encoded if len(encoded) < MOST_CHANGED * len(new) else None


def apply(encoded: bytes, data: NDArray[np.uint8]) -> None:
    """Make the new chunk of the old one, in place.

    Raises:
        StateDictError: it is no delta of such a chunk; `data` is as it was.
    """
    try:
        word, gap, count = _HEADER.unpack_from(encoded)
        if not count:
            return
        signed, unsigned = _SIGNED[word], _UNSIGNED[gap]
        size = count * (gap + word)
        body = zstandard.ZstdDecompressor().decompress(encoded[_HEADER.size :], max_output_size=size)
        if len(body) != size or word * count > len(data):
            raise ValueError(f"{len(body)} bytes say {count} changes of {len(data)} bytes")
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
    """All low bytes, then all that are next: the high ones are nearly all 0."""
    return words.view(np.uint8).reshape(len(words), -1).T.tobytes()


def _words(planes: bytes, dtype: type[np.integer[Any]]) -> NDArray[np.integer[Any]]:
    size = np.dtype(dtype).itemsize
    return np.ascontiguousarray(np.frombuffer(planes, np.uint8).reshape(size, -1).T).reshape(-1).view(dtype)

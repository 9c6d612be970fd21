"""Where the tensors of a shard lie in its bytes, and how they get there."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from titan_rl.core.errors import StateDictError
from titan_rl.weights.shard_files.shard_file import ALIGNMENT
from titan_rl.weights.types import TensorEntry, TensorSlice

PIECE = 1 << 20  # bytes copied before `fill` tells of them: few enough to be in the cache still

Buffer = NDArray[np.uint8] | torch.Tensor
Named = Sequence[tuple[str, torch.Tensor | TensorSlice]]

with warnings.catch_warnings():  # torch says once a process that it cannot guard read-only memory, which is understood
    warnings.simplefilter("ignore")
    torch.frombuffer(b"\0", dtype=torch.uint8)


def lay_out(named: Named) -> tuple[TensorEntry, ...]:
    """The tensors one after the other, each at a multiple of `ALIGNMENT`.

    Raises:
        StateDictError: a tensor or a slice of it appears twice.
    """
    entries: dict[tuple[str, tuple[int, ...] | None], TensorEntry] = {}
    offset = 0
    for name, value in named:
        tensor, position = (value.tensor, value.position) if isinstance(value, TensorSlice) else (value, None)
        shape = tuple(tensor.shape)
        if position is not None and shape == position.whole_shape and not any(position.start):
            position = None
        key = (name, None if position is None else position.start)
        if key in entries:
            raise StateDictError(f"{name!r} appears twice in the state dict")
        own = str(tensor.dtype).removeprefix("torch.")
        dtype = (value.dtype if isinstance(value, TensorSlice) else None) or own
        num_bytes = tensor.numel() * getattr(torch, dtype).itemsize
        entries[key] = TensorEntry(name, dtype, shape, offset, num_bytes, position)
        offset = _align(offset + entries[key].num_bytes)
    return tuple(entries.values())


def size_of(entries: Sequence[TensorEntry]) -> int:
    """Bytes, a multiple of `ALIGNMENT`."""
    return _align(entries[-1].offset + entries[-1].num_bytes) if entries else 0


@torch.no_grad()
def fill(
    buffer: NDArray[np.uint8] | torch.Tensor,
    named: Named,
    entries: Sequence[TensorEntry],
    written: Callable[[int], None] = lambda num_bytes: None,
) -> None:
    """Copy the tensors, from whatever device, to their places, each in its entry's dtype. Every byte is written.

    Args:
        written: told now and then how many bytes from the start are written.
    """
    for (_, value), entry in zip(named, entries, strict=True):
        tensor = value.tensor if isinstance(value, TensorSlice) else value
        end = entry.offset + entry.num_bytes
        if entry.num_bytes:
            place = view(buffer, entry)
            if isinstance(buffer, np.ndarray) and tensor.device.type == "cpu" and tensor.is_contiguous():
                at = entry.offset
                parts = max(PIECE // place.itemsize, 1)
                for to, source in zip(place.view(-1).split(parts), tensor.view(-1).split(parts), strict=True):
                    to.copy_(source)
                    at += to.nbytes
                    written(at)
            else:
                place.copy_(tensor)
        buffer[end : _align(end)] = 0  # a used shard has old bytes there, which the checksum would see
        written(_align(end))


def view(buffer: Buffer, entry: TensorEntry) -> torch.Tensor:
    """The entry's bytes as a tensor that shares them."""
    dtype = getattr(torch, entry.dtype)
    numel = math.prod(entry.shape)
    if numel == 0:
        return torch.empty(entry.shape, dtype=dtype)
    if isinstance(buffer, torch.Tensor):
        return buffer[entry.offset : entry.offset + entry.num_bytes].view(dtype).view(entry.shape)
    return torch.frombuffer(buffer, dtype=dtype, count=numel, offset=entry.offset).view(entry.shape)


def _align(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT

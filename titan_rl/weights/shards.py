"""Shards of a version as bytes: the layout of tensors in them, and tensors assembled from them."""

from __future__ import annotations

import math
import warnings
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from titan_rl.core.errors import StateDictError
from titan_rl.weights.manifest import position_of, slices_by_name
from titan_rl.weights.shard_files import ALIGNMENT, BLOCK_WORDS, block_sums, checksum_of_parts
from titan_rl.weights.types import Manifest, Shard, TensorEntry, TensorSlice

Buffer = NDArray[np.uint8] | torch.Tensor
Named = Sequence[tuple[str, torch.Tensor | TensorSlice]]

with warnings.catch_warnings():  # torch warns once in a process that it cannot guard read-only memory
    warnings.simplefilter("ignore")
    torch.frombuffer(b"\0", dtype=torch.uint8)


def lay_out(named: Named) -> tuple[TensorEntry, ...]:
    """Lay the tensors out one after the other, each at a multiple of `ALIGNMENT`.

    Raises:
        StateDictError: A tensor or a slice of it appears twice.
    """
    entries: dict[tuple[str, tuple[int, ...] | None], TensorEntry] = {}
    offset = 0
    for name, value in named:
        part = TensorSlice.of(value)
        position = part.partial_position
        key = name, position and position.start
        if key in entries:
            raise StateDictError(f"{name!r} appears twice in the state dict")
        dtype = part.dtype or str(part.tensor.dtype).removeprefix("torch.")
        num_bytes = part.tensor.numel() * getattr(torch, dtype).itemsize
        entries[key] = TensorEntry(name, dtype, tuple(part.tensor.shape), offset, num_bytes, position)
        offset = _align(offset + num_bytes)
    return tuple(entries.values())


def size_of(entries: Sequence[TensorEntry]) -> int:
    """Size in bytes of a shard with these entries, a multiple of `ALIGNMENT`."""
    return _align(entries[-1].offset + entries[-1].num_bytes) if entries else 0


@torch.no_grad()
def fill(buffer: NDArray[np.uint8] | torch.Tensor, named: Named, entries: Sequence[TensorEntry]) -> None:
    """Copy the tensors, from any device, to their places, each in its entry's dtype. Every byte is written.

    Args:
        buffer: Memory of the shard.  # [num_bytes], uint8
        named: Tensors and slices by name, in the order of `entries`.
        entries: Layout of the shard; see `lay_out`.
    """
    for (_, value), entry in zip(named, entries, strict=True):
        if entry.num_bytes:
            view(buffer, entry).copy_(TensorSlice.of(value).tensor)
        _clear_padding(buffer, entry)


def fill_and_sum(buffer: NDArray[np.uint8], named: Named, entries: Sequence[TensorEntry]) -> int:
    """`fill`, and return the checksum of the buffer. Several threads copy contiguous tensors of the CPU block by block,
    and sum each block while it is in the cache."""
    flat: list[tuple[torch.Tensor, torch.Tensor] | None] = []  # (target, source) of each entry that is copied by blocks
    for (name, value), entry in zip(named, entries, strict=True):
        tensor = TensorSlice.of(value).tensor
        if tensor.device.type == "cpu" and tensor.is_contiguous():
            target, source = view(buffer, entry).view(-1), tensor.detach().view(-1)
            if target.dtype == source.dtype:
                target, source = target.view(torch.uint8), source.view(torch.uint8)
            flat.append((target, source))
            _clear_padding(buffer, entry)
        else:
            flat.append(None)
            fill(buffer, [(name, value)], [entry])
    offsets = [entry.offset for entry in entries]

    def copy(start: int, end: int) -> None:
        for index in range(bisect_right(offsets, start) - 1, bisect_left(offsets, end)):
            if (pair := flat[index]) is not None:
                target, source = pair
                first, last = (max(at - offsets[index], 0) // target.itemsize for at in (start, end))
                if target.dtype == source.dtype:
                    np.copyto(target[first:last].numpy(), source[first:last].numpy())  # a tenth faster than torch
                else:
                    target[first:last].copy_(source[first:last])

    def copy_and_sum(start: int, end: int) -> NDArray[np.uint64]:
        sums: list[NDArray[np.uint64]] = []
        for at in range(start, end, BLOCK_WORDS * 8):
            until = min(at + BLOCK_WORDS * 8, end)
            copy(at, until)
            sums.append(block_sums(buffer[at:until]))
        return np.concatenate(sums)

    return checksum_of_parts(len(buffer), copy_and_sum)


def _clear_padding(buffer: NDArray[np.uint8] | torch.Tensor, entry: TensorEntry) -> None:
    """Write zeros up to the next entry: old bytes of a reused shard would change the checksum."""
    end = entry.offset + entry.num_bytes
    buffer[end : _align(end)] = 0


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


def assemble(
    manifest: Manifest, open_shard: Callable[[Shard], Buffer], *, copy: bool = False
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) pairs of a version. All checks are done when this function returns. A tensor in several slices is
    assembled when the iterator reaches it.

    Args:
        manifest: Manifest of the version.
        open_shard: Returns a shard's verified bytes.  # [num_bytes] or more
        copy: Whether to copy also tensors that one shard has whole, instead of returning views of it.

    Raises:
        StateDictError: The slices in the manifest do not make up the tensors or do not fit the bytes; or raised by
            `open_shard`.
    """
    tensors = slices_by_name(manifest)
    for shard in manifest.shards:
        for entry in shard.entries:
            _check_entry(entry, shard.num_bytes, manifest.version)
    buffers = [open_shard(shard) for shard in manifest.shards]
    return ((name, _tensor(slices, buffers, copy)) for name, slices in tensors.items())


def _tensor(slices: Sequence[tuple[int, TensorEntry]], buffers: Sequence[Buffer], copy: bool) -> torch.Tensor:
    if len(slices) == 1:
        ((shard, entry),) = slices
        tensor = view(buffers[shard], entry)
        full = tensor if entry.position is None else tensor.view(entry.position.global_shape)
        return full.clone() if copy else full
    _, first = slices[0]
    pieces = [(entry, view(buffers[shard], entry)) for shard, entry in slices]
    full = torch.empty(position_of(first).global_shape, dtype=getattr(torch, first.dtype), device=pieces[0][1].device)
    for entry, piece in pieces:
        box = full
        for dim, (start, size) in enumerate(zip(position_of(entry).start, entry.shape, strict=True)):
            box = box.narrow(dim, start, size)
        box.copy_(piece)
    return full


def _check_entry(entry: TensorEntry, num_bytes: int, version: int) -> None:
    dtype = getattr(torch, entry.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise StateDictError(f"{entry.name!r} of version {version} has unknown dtype {entry.dtype!r}")
    fits = entry.offset >= 0 and entry.offset + entry.num_bytes <= num_bytes
    if not fits or math.prod(entry.shape) * dtype.itemsize != entry.num_bytes:
        raise StateDictError(
            f"{entry.name!r} of version {version} does not fit the {num_bytes} bytes of its shard: {entry}"
        )

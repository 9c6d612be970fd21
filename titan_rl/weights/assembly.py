"""Tensors out of the shards that hold them: views where one shard has a tensor whole, copies where several share it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch

from titan_rl.core.errors import StateDictError
from titan_rl.weights.layout import Buffer, view
from titan_rl.weights.shards import position_of, slices_by_name
from titan_rl.weights.types import Manifest, Shard, TensorEntry


def assemble(
    manifest: Manifest, open_shard: Callable[[Shard], Buffer], *, copy: bool = False
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) pairs of a version. All checks are done when this returns; tensors are copied together one at a
    time, as they are asked for.

    Args:
        open_shard: gives a shard's verified bytes.  # [num_bytes] or more
        copy: also of tensors that one shard has whole, of which views are given otherwise.

    Raises:
        StateDictError: the manifest describes slices that do not make up the tensors or do not fit the bytes, or what
            `open_shard` raises.
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
        whole = tensor if entry.position is None else tensor.view(entry.position.whole_shape)
        return whole.clone() if copy else whole
    _, first = slices[0]
    pieces = [(entry, view(buffers[shard], entry)) for shard, entry in slices]
    whole = torch.empty(position_of(first).whole_shape, dtype=getattr(torch, first.dtype), device=pieces[0][1].device)
    for entry, piece in pieces:
        box = whole
        for dim, (start, size) in enumerate(zip(position_of(entry).start, entry.shape, strict=True)):
            box = box.narrow(dim, start, size)
        box.copy_(piece)
    return whole


def _check_entry(entry: TensorEntry, num_bytes: int, version: int) -> None:
    dtype = getattr(torch, entry.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise StateDictError(f"{entry.name!r} of version {version} has unknown dtype {entry.dtype!r}")
    fits = entry.offset >= 0 and entry.offset + entry.num_bytes <= num_bytes
    if not fits or math.prod(entry.shape) * dtype.itemsize != entry.num_bytes:
        raise StateDictError(
            f"{entry.name!r} of version {version} does not fit the {num_bytes} bytes of its shard: {entry}"
        )

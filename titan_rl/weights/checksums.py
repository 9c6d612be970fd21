"""Checksums of published tensors, by which a reader finds out whether it holds what the trainer has."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import torch

from titan_rl.core.errors import StateDictError
from titan_rl.core.tensor_checksum import TensorChecksum, box_sum, checksums_of
from titan_rl.weights.shards import slices_by_name
from titan_rl.weights.types import Manifest, TensorEntry, TensorSlice

PIECE = {"cpu": 1 << 18, "cuda": 1 << 26}  # elements converted at a time


def with_checksums(manifest: Manifest, named: Iterable[tuple[str, torch.Tensor | TensorSlice]]) -> Manifest:
    """The manifest of what one process has published, with the checksums of what it was given to publish.

    They are taken of the trainer's own tensors rather than of what a transport has copied, so a transport is verified,
    too. A transport whose manifest does not list its tensors stays without.
    """
    if len(manifest.shards) != 1:
        return manifest
    (shard,) = manifest.shards
    sums = {_key(name, value): _sum(value) for name, value in named}
    wanted = [(entry.name, entry.position.start if entry.position else None) for entry in shard.entries]
    if not wanted or any(key not in sums for key in wanted):
        return manifest
    values = checksums_of([sums[key] for key in wanted])
    return replace(manifest, shards=(replace(shard, box_checksums=np.array(values, "<u8").tobytes()),))


def published_checksums(manifest: Manifest) -> dict[str, TensorChecksum]:
    """The checksum of each tensor by its Hugging Face name. Empty where a shard comes without.

    Raises:
        StateDictError: the slices of a tensor do not make it up, or a shard has more or fewer checksums than tensors.
    """
    if not all(shard.box_checksums or not shard.entries for shard in manifest.shards):
        return {}
    values = [np.frombuffer(shard.box_checksums, "<u8") for shard in manifest.shards]
    for shard, found in zip(manifest.shards, values, strict=True):
        if len(found) != len(shard.entries):
            raise StateDictError(f"{shard.location} has {len(found)} checksums for {len(shard.entries)} tensors")
    places = [{id(entry): place for place, entry in enumerate(shard.entries)} for shard in manifest.shards]
    return {
        name: _joined([(entry, int(values[shard][places[shard][id(entry)]])) for shard, entry in slices])
        for name, slices in slices_by_name(manifest).items()
    }


def _joined(slices: list[tuple[TensorEntry, int]]) -> TensorChecksum:
    entry, _ = slices[0]
    shape = entry.position.whole_shape if entry.position else entry.shape
    return TensorChecksum(entry.dtype, shape, sum(value for _, value in slices) % 2**64)


def _key(name: str, value: torch.Tensor | TensorSlice) -> tuple[str, tuple[int, ...] | None]:
    if not isinstance(value, TensorSlice):
        return name, None
    position = value.position
    is_whole = tuple(value.tensor.shape) == position.whole_shape and not any(position.start)
    return name, None if is_whole else position.start


def _sum(value: torch.Tensor | TensorSlice) -> torch.Tensor:
    piece_of = value if isinstance(value, TensorSlice) else None
    tensor: torch.Tensor = value if piece_of is None else piece_of.tensor  # pyright: ignore[reportAssignmentType]
    start = () if piece_of is None else piece_of.position.start
    dtype = tensor.dtype if piece_of is None or piece_of.dtype is None else getattr(torch, piece_of.dtype)
    piece = PIECE.get(tensor.device.type, PIECE["cuda"])
    if tensor.dtype == dtype or tensor.ndim == 0 or tensor.numel() <= piece:
        return box_sum(tensor.to(dtype), start)
    start = start or (0,) * tensor.ndim
    rows = max(1, piece * len(tensor) // tensor.numel())
    sums = [
        box_sum(tensor[at : at + rows].to(dtype), (start[0] + at, *start[1:])) for at in range(0, len(tensor), rows)
    ]
    return torch.stack(sums).sum()

"""Manifests of a version: joining the manifests of several writers, checking their slices, and a compact encoding."""

from __future__ import annotations

import hashlib
import math
import zlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import msgspec
import numpy as np

from titan_rl.core.errors import StateDictError
from titan_rl.weights.types import Manifest, SlicePosition, TensorEntry

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(tuple[TensorEntry, ...])


class ShardLayout(tuple[TensorEntry, ...]):
    """The entries of a shard, with their encoding for messages, which takes an eighth of the bytes and a tenth of the
    time of a pickle. A layout is equal to the tuple of its entries."""

    encoded: bytes
    digest: str

    @classmethod
    def of(cls, entries: Iterable[TensorEntry]) -> ShardLayout:
        if isinstance(entries, ShardLayout):
            return entries
        layout = cls(entries)
        return layout._name(zlib.compress(_encoder.encode(tuple(layout)), 1))

    def _name(self, encoded: bytes) -> ShardLayout:
        self.encoded = encoded
        self.digest = hashlib.sha256(encoded).hexdigest()
        return self

    def __reduce__(self) -> tuple[object, ...]:
        return decoded, (self.encoded,)


@lru_cache(8)  # a process that receives a version several times decodes its entries once
def decoded(encoded: bytes) -> ShardLayout:
    """Layout from its encoding."""
    return ShardLayout(_decoder.decode(zlib.decompress(encoded)))._name(encoded)


@dataclass(frozen=True, slots=True)
class PackedManifest:
    """A manifest without the layouts that its receiver has already."""

    manifest: Manifest  # its shards have no entries
    digests: tuple[str, ...]  # digests of the shards' layouts
    layouts: tuple[ShardLayout, ...]  # layouts that the receiver lacks


def pack(manifest: Manifest, known: Collection[str] = ()) -> PackedManifest:
    """Pack the manifest for a receiver that has the layouts with these digests."""
    layouts = [ShardLayout.of(shard.entries) for shard in manifest.shards]
    lacking = {layout.digest: layout for layout in layouts if layout.digest not in known}
    bare = replace(manifest, shards=tuple(replace(shard, entries=()) for shard in manifest.shards))
    return PackedManifest(bare, tuple(layout.digest for layout in layouts), tuple(lacking.values()))


class KnownLayouts:
    """Cache of the layouts of the other end's most recent manifests.

    Example:

        known.unpack([pack(manifest, known.digests)]) == [manifest]
    """

    def __init__(self) -> None:
        self._layouts: dict[str, ShardLayout] = {}

    @property
    def digests(self) -> frozenset[str]:
        return frozenset(self._layouts)

    def unpack(self, packed: Iterable[PackedManifest]) -> list[Manifest]:
        """Unpack manifests, which may be those of several shards of one version.

        Raises:
            StateDictError: A layout is neither known nor sent. The cache is unchanged.
        """
        packed = list(packed)
        layouts = self._layouts | {layout.digest: layout for one in packed for layout in one.layouts}
        digests = {digest for one in packed for digest in one.digests}
        if lacking := digests - layouts.keys():
            raise StateDictError(f"a manifest lacks the layouts {sorted(lacking)}, which are not known here")
        self._layouts = {digest: layouts[digest] for digest in digests}
        return [
            replace(
                one.manifest,
                shards=tuple(
                    replace(shard, entries=layouts[digest])
                    for shard, digest in zip(one.manifest.shards, one.digests, strict=True)
                ),
            )
            for one in packed
        ]


def join(manifests: Sequence[Manifest]) -> Manifest:
    """Join the manifests of the processes that published a version. Probes and tolerance are taken from the first.

    The first manifest names every tensor, even if its shard has no part of it, so that readers notice a missing shard.

    Raises:
        StateDictError: There is no manifest, or the manifests have different versions.
    """
    versions = sorted({manifest.version for manifest in manifests})
    if len(versions) != 1:
        raise StateDictError(f"shards of versions {versions} cannot be joined; all must be of one version")
    return replace(manifests[0], shards=tuple(shard for manifest in manifests for shard in manifest.shards))


def slices_by_name(manifest: Manifest) -> dict[str, list[tuple[int, TensorEntry]]]:
    """The slices of each tensor, with the indices of their shards. Tensors are in the order of the manifest.

    Example: `{"model.norm.weight": [(0, TensorEntry(...)), (1, TensorEntry(...))]}`

    Raises:
        StateDictError: Slices of a tensor differ in dtype or whole shape, lie outside it, overlap or leave a gap.
    """
    found: dict[str, list[tuple[int, TensorEntry]]] = {}
    for index, shard in enumerate(manifest.shards):
        for entry in shard.entries:
            found.setdefault(entry.name, []).append((index, entry))
    for name, slices in found.items():
        if len(slices) > 1 or slices[0][1].position is not None:
            found[name] = _check(slices, f"{name!r} of version {manifest.version}")
    return found


def position_of(entry: TensorEntry) -> SlicePosition:
    """Position of an entry's slice in its tensor; a whole tensor starts at 0."""
    return entry.position or SlicePosition((0,) * len(entry.shape), entry.shape)


def _check(slices: list[tuple[int, TensorEntry]], tensor: str) -> list[tuple[int, TensorEntry]]:
    """Check that the slices cover the tensor exactly once, and return those that have elements."""
    _, first = slices[0]
    dtype, shape = first.dtype, position_of(first).global_shape
    for shard, entry in slices:
        if (entry.dtype, position_of(entry).global_shape) != (dtype, shape):
            raise StateDictError(
                f"{tensor} is {dtype} {shape} in shard {slices[0][0]} and "
                f"{entry.dtype} {position_of(entry).global_shape} in shard {shard}"
            )
        start = position_of(entry).start
        if not len(start) == len(entry.shape) == len(shape) or not all(
            0 <= at <= at + size <= length for at, size, length in zip(start, entry.shape, shape, strict=True)
        ):
            raise StateDictError(f"{tensor}: the slice {entry.shape} at {start} in shard {shard} is not within {shape}")
    filled = [(shard, entry) for shard, entry in slices if math.prod(entry.shape)]
    if len(filled) > 1 and (pair := _overlap([entry for _, entry in filled])) is not None:
        (shard, entry), (other_shard, other) = (filled[index] for index in pair)
        raise StateDictError(
            f"{tensor}: the slices at {position_of(entry).start} in shard {shard} and "
            f"at {position_of(other).start} in shard {other_shard} overlap"
        )
    covered = sum(math.prod(entry.shape) for _, entry in filled)
    if covered != math.prod(shape):
        raise StateDictError(f"{tensor}: its slices cover {covered} of {math.prod(shape)} elements; a shard is missing")
    return filled or slices[:1]


def _overlap(entries: Sequence[TensorEntry]) -> tuple[int, int] | None:
    """Indices of two entries that have an element in common; None if there are none."""
    starts_KD = np.array([position_of(entry).start for entry in entries])
    ends_KD = starts_KD + np.array([entry.shape for entry in entries], starts_KD.dtype)
    common_KK = ((starts_KD[:, None] < ends_KD) & (starts_KD < ends_KD[:, None])).all(-1)
    pairs = np.argwhere(np.triu(common_KK, 1))
    return (int(pairs[0, 0]), int(pairs[0, 1])) if len(pairs) else None

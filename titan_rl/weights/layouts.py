"""Layouts of shards, which two processes tell each other once: afterwards a digest stands for one."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

import msgspec

from titan_rl.core.errors import StateDictError
from titan_rl.weights.types import Manifest, TensorEntry

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(tuple[TensorEntry, ...])


class ShardLayout(tuple[TensorEntry, ...]):
    """The entries of a shard, with the bytes that stand for them in messages: an eighth of their pickle's, in a tenth
    of its time. Equal to the tuple of the entries."""

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


@lru_cache(8)  # a process that is told of a version again and again makes its entries once
def decoded(encoded: bytes) -> ShardLayout:
    """The layout of its `encoded`."""
    return ShardLayout(_decoder.decode(zlib.decompress(encoded)))._name(encoded)


@dataclass(frozen=True, slots=True)
class PackedManifest:
    """A manifest without what its receiver has already."""

    manifest: Manifest  # its shards have no entries
    digests: tuple[str, ...]  # of the shards' layouts
    layouts: tuple[ShardLayout, ...]  # those that the receiver lacks


def pack(manifest: Manifest, known: Collection[str] = ()) -> PackedManifest:
    """The manifest for a receiver that has the layouts of these digests."""
    layouts = [ShardLayout.of(shard.entries) for shard in manifest.shards]
    lacking = {layout.digest: layout for layout in layouts if layout.digest not in known}
    bare = replace(manifest, shards=tuple(replace(shard, entries=()) for shard in manifest.shards))
    return PackedManifest(bare, tuple(layout.digest for layout in layouts), tuple(lacking.values()))


class KnownLayouts:
    """What one end has of another's layouts: those of the manifests that came last.

    Example:

        known.unpack([pack(manifest, known.digests)]) == [manifest]
    """

    def __init__(self) -> None:
        self._layouts: dict[str, ShardLayout] = {}

    @property
    def digests(self) -> frozenset[str]:
        return frozenset(self._layouts)

    def unpack(self, packed: Iterable[PackedManifest]) -> list[Manifest]:
        """The manifests whole, which may be of several shards of one version.

        Raises:
            StateDictError: a layout is neither known nor there; all that were known before are so still.
        """
        packed = list(packed)
        layouts = self._layouts | {layout.digest: layout for one in packed for layout in one.layouts}
        digests = {digest for one in packed for digest in one.digests}
        if lacking := digests - layouts.keys():
            raise StateDictError(f"a manifest came without the layouts {sorted(lacking)}, which are not known here")
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

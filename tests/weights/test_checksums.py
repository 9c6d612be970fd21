"""Checksums of the trainer's tensors, which are published with each version over any transport."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from titan_rl.core.errors import StateDictError
from titan_rl.core.tensor_checksum import TensorChecksum, box_checksum
from titan_rl.weights.manifest import KnownLayouts, join, pack
from titan_rl.weights.transports.shared_memory import SharedMemoryTransport
from titan_rl.weights.types import Manifest, SlicePosition, TensorSlice
from titan_rl.weights.verification import published_checksums, with_checksums


def cut(tensor: torch.Tensor, first: int, last: int, dtype: str | None = None) -> TensorSlice:
    return TensorSlice(tensor[first:last], SlicePosition((first, 0), tuple(tensor.shape)), dtype)


def test_converted_slices_combine_to_the_checksums_of_whole_tensors(tmp_path: Path) -> None:
    matrix, vector = torch.randn(2000, 300), torch.randn(7)  # the matrix is converted in several parts
    manifests: list[Manifest] = []
    for rank, (first, last) in enumerate(((0, 1999), (1999, 2000))):
        named = [("matrix", cut(matrix, first, last, "bfloat16"))]
        named += [("vector", TensorSlice(vector, SlicePosition((0,), (7,)), "bfloat16"))] if rank else []
        manifest = SharedMemoryTransport(f"rank-{rank}", root=tmp_path).publish(1, named)
        manifests.append(with_checksums(manifest, named))
    expected = {
        "matrix": TensorChecksum("bfloat16", (2000, 300), box_checksum(matrix.bfloat16())),
        "vector": TensorChecksum("bfloat16", (7,), box_checksum(vector.bfloat16())),
    }
    whole = join(manifests)
    assert published_checksums(whole) == expected

    known = KnownLayouts()  # as the manifest is sent
    assert published_checksums(known.unpack(pickle.loads(pickle.dumps([pack(whole)])))[0]) == expected


def test_published_checksums_are_empty_without_checksums_or_entries(tmp_path: Path) -> None:
    named = [("a", torch.ones(3))]
    manifest = SharedMemoryTransport("run", root=tmp_path).publish(1, named)
    assert published_checksums(manifest) == {}
    (shard,) = manifest.shards
    bare = replace(manifest, shards=(replace(shard, entries=()),))  # a transport that does not list its tensors
    assert published_checksums(with_checksums(bare, named)) == {}
    assert published_checksums(with_checksums(replace(manifest, shards=()), named)) == {}


def test_rejects_a_checksum_count_that_does_not_match_the_tensors(tmp_path: Path) -> None:
    named = [("a", torch.ones(3)), ("b", torch.zeros(2))]
    manifest = with_checksums(SharedMemoryTransport("run", root=tmp_path).publish(1, named), named)
    (shard,) = manifest.shards
    short = replace(manifest, shards=(replace(shard, box_checksums=shard.box_checksums[:8]),))
    with pytest.raises(StateDictError, match="1 checksums for 2 tensors"):
        published_checksums(short)

"""Versions written by several processes: for any sharding, a reader gets the tensors or an error."""

from __future__ import annotations

import contextlib
import itertools
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from depth import examples
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from titan_rl.core.errors import StateDictError
from titan_rl.weights import shard_files
from titan_rl.weights.manifest import join
from titan_rl.weights.shards import fill, fill_and_sum, lay_out, size_of
from titan_rl.weights.transports.shared_memory import SharedMemoryTransport
from titan_rl.weights.types import Manifest, Probe, SlicePosition, TensorEntry, TensorSlice

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool]

Cut = list[list[tuple[str, torch.Tensor | TensorSlice]]]


def piece(tensor: torch.Tensor, start: tuple[int, ...], shape: tuple[int, ...]) -> TensorSlice:
    box = tensor
    for dim, (at, size) in enumerate(zip(start, shape, strict=True)):
        box = box.narrow(dim, at, size)
    return TensorSlice(box, SlicePosition(start, tuple(tensor.shape)))


def rows(tensor: torch.Tensor, begin: int, end: int) -> TensorSlice:
    return piece(tensor, (begin, *[0] * (tensor.dim() - 1)), (end - begin, *tensor.shape[1:]))


@contextlib.contextmanager
def published(cut: Cut, version: int = 1) -> Iterator[Manifest]:
    """Publish each shard with its own writer, and yield the joined manifest."""
    with contextlib.ExitStack() as stack:
        writers = [stack.enter_context(SharedMemoryTransport("shards")) for _ in cut]
        yield join([writer.publish(version, shard) for writer, shard in zip(writers, cut, strict=True)])


def pull(manifest: Manifest) -> dict[str, torch.Tensor]:
    return dict(SharedMemoryTransport("reader").pull(manifest))


@st.composite
def boxes(draw: Any, start: tuple[int, ...], shape: tuple[int, ...], depth: int = 3) -> list[tuple[Any, Any]]:
    """(start, shape) of boxes that partition a box, by repeatedly cutting it in two."""
    dims = [dim for dim, size in enumerate(shape) if size > 1]
    if not depth or not dims or draw(st.booleans()):
        return [(start, shape)]
    dim = draw(st.sampled_from(dims))
    at = draw(st.integers(1, shape[dim] - 1))
    lower = (*shape[:dim], at, *shape[dim + 1 :])
    upper = (*shape[:dim], shape[dim] - at, *shape[dim + 1 :])
    upper_start = (*start[:dim], start[dim] + at, *start[dim + 1 :])
    return draw(boxes(start, lower, depth - 1)) + draw(boxes(upper_start, upper, depth - 1))


@dataclass
class Version:
    tensors: dict[str, torch.Tensor]
    cut: Cut


@st.composite
def versions(draw: Any) -> Version:
    """Tensors cut into boxes and assigned to shards. The first shard names every tensor, as a trainer's first rank
    does."""
    num_parts = draw(st.integers(1, 4))
    tensors: dict[str, torch.Tensor] = {}
    cut: Cut = [[] for _ in range(num_parts)]
    for index in range(draw(st.integers(1, 4))):
        name, shape = f"t{index}", tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
        tensors[name] = torch.randint(0, 100, shape).to(draw(st.sampled_from(DTYPES)))
        for start, size in draw(boxes((0,) * len(shape), shape)):
            # A scalar has no empty slice with which the first shard could name it.
            owner = draw(st.integers(0, num_parts - 1)) if shape else 0
            cut[owner].append((name, piece(tensors[name], start, size)))
        if name not in {other for other, _ in cut[0]}:
            cut[0].append((name, rows(tensors[name], 0, 0)))
    return Version(tensors, cut)


@given(versions())
@settings(max_examples=examples(100), deadline=None)
def test_random_shardings_read_back_equal_and_in_order(version: Version) -> None:
    with published(version.cut) as manifest:
        found = pull(manifest)
    assert list(found) == list(version.tensors)
    for name, tensor in version.tensors.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert torch.equal(found[name], tensor)


@given(
    shapes=st.lists(st.tuples(st.sampled_from([0, 1, 3, 5000, 262_144, 700_001]), st.integers(0, 3)), max_size=5),
    layout=st.data(),
)
@settings(max_examples=examples(25), deadline=None)
def test_threaded_fill_and_sum_matches_a_serial_fill(shapes: list[tuple[int, int]], layout: st.DataObject) -> None:
    """A block may contain several tensors and a tensor several blocks, unchanged, converted or transposed."""
    named: list[tuple[str, torch.Tensor | TensorSlice]] = []
    for index, shape in enumerate(shapes):
        tensor = torch.randint(0, 100, shape).to(layout.draw(st.sampled_from(DTYPES)))
        if tensor.is_floating_point():
            tensor.requires_grad_(layout.draw(st.booleans()))
        if layout.draw(st.booleans()):
            tensor = tensor.t()
        position = SlicePosition((0, 0), tuple(tensor.shape))
        named.append((f"t{index}", TensorSlice(tensor, position, layout.draw(st.sampled_from([None, "float64"])))))
    entries = lay_out(named)
    expected, found = np.full((2, size_of(entries)), 170, np.uint8)
    fill(expected, named, entries)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_files, "PART_BLOCKS", 1)  # to get many parts
        patch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2}, raising=False)
        checksum = fill_and_sum(found, named, entries)
    assert np.array_equal(found, expected)
    blocks = [expected[at : at + (1 << 20)].view(np.uint64).sum() for at in range(0, len(expected), 1 << 20)]
    assert checksum == shard_files.checksum(expected) == zlib.crc32(np.array(blocks, np.uint64).tobytes())


def with_entries(manifest: Manifest, shard: int, entries: list[TensorEntry]) -> Manifest:
    shards = list(manifest.shards)
    shards[shard] = replace(shards[shard], entries=tuple(entries))
    return replace(manifest, shards=tuple(shards))


def shifted(entry: TensorEntry) -> TensorEntry:
    position = entry.position or SlicePosition((0,) * len(entry.shape), entry.shape)
    return replace(entry, position=replace(position, start=(position.start[0] + 1, *position.start[1:])))


@given(version=versions(), fault=st.sampled_from(["absent", "lost", "twice", "moved", "torn", "gone"]), data=st.data())
@settings(max_examples=examples(100), deadline=None)
def test_single_fault_in_one_shard_fails_the_pull(version: Version, fault: str, data: st.DataObject) -> None:
    with published(version.cut) as manifest:
        filled = [(p, e) for p, shard in enumerate(manifest.shards) for e in shard.entries if e.num_bytes]
        if fault == "absent":  # the manifest of a rank other than the first, to which the others are joined
            filled = [(shard, entry) for shard, entry in filled if shard]
        if fault in ("lost", "moved"):
            filled = [(shard, entry) for shard, entry in filled if entry.shape]
        assume(filled)
        chosen, entry = data.draw(st.sampled_from(filled))
        shard = manifest.shards[chosen]
        others = [other for other in shard.entries if other is not entry]
        match fault:
            case "absent":
                manifest = replace(manifest, shards=(*manifest.shards[:chosen], *manifest.shards[chosen + 1 :]))
            case "lost":
                empty = replace(entry, shape=(0, *entry.shape[1:]), num_bytes=0)
                empty = replace(empty, position=entry.position or SlicePosition((0,) * len(entry.shape), entry.shape))
                manifest = with_entries(manifest, chosen, [*others, empty])
            case "twice":
                index = data.draw(st.integers(0, len(manifest.shards) - 1))
                manifest = with_entries(manifest, index, [*manifest.shards[index].entries, entry])
            case "moved":
                manifest = with_entries(manifest, chosen, [*others, shifted(entry)])
            case "torn":
                with open(shard.location, "r+b") as file:
                    file.seek(entry.offset)
                    (byte,) = file.read(1)
                    file.seek(entry.offset)
                    file.write(bytes([byte ^ 1]))
            case "gone":
                os.unlink(shard.location)
        with pytest.raises(StateDictError):
            SharedMemoryTransport("reader").pull(manifest)


WHOLE = torch.arange(24.0).reshape(6, 4)


@pytest.mark.parametrize(
    ("cut", "message"),
    [
        ([rows(WHOLE, 0, 3), rows(WHOLE, 2, 6)], r"slices at \(0, 0\) in shard 0 and at \(2, 0\) in shard 1 overlap"),
        ([rows(WHOLE, 0, 3), rows(WHOLE, 4, 6)], "cover 20 of 24 elements"),
        ([rows(WHOLE, 0, 3), rows(WHOLE.half(), 3, 6)], "float32 .* in shard 0 and float16 .* in shard 1"),
        ([rows(WHOLE, 0, 3), rows(WHOLE[:, :2], 3, 6)], r"\(6, 4\) in shard 0 and float32 \(6, 2\) in shard 1"),
        ([WHOLE, WHOLE], "overlap"),
        ([TensorSlice(WHOLE[:3], SlicePosition((4, 0), (6, 4)))], "not within"),
        ([TensorSlice(WHOLE[:3], SlicePosition((0,), (6, 4)))], "not within"),
    ],
)
def test_inconsistent_slices_error_names_the_problem(cut: list[torch.Tensor | TensorSlice], message: str) -> None:
    with published([[("a", value)] for value in cut]) as manifest, pytest.raises(StateDictError, match=message):
        SharedMemoryTransport("reader").pull(manifest)


def test_tensor_whole_in_one_shard_is_a_view_of_its_memory() -> None:
    cut: Cut = [
        [("a", rows(WHOLE, 0, 0)), ("b", rows(WHOLE, 0, 3)), ("c", rows(WHOLE, 0, 0))],
        [("a", rows(WHOLE, 0, 6)), ("b", rows(WHOLE, 3, 6)), ("c", WHOLE)],
    ]
    with published(cut) as manifest:
        found = pull(manifest)
    assert all(torch.equal(tensor, WHOLE) for tensor in found.values())
    assert found["c"].data_ptr() - found["a"].data_ptr() == 128 + 64  # the bytes of a and of half of b, aligned to 64


def test_pulled_tensors_outlive_their_writers() -> None:
    cut: Cut = [[("a", rows(WHOLE, 0, 3)), ("b", WHOLE)], [("a", rows(WHOLE, 3, 6))]]
    with published(cut) as manifest:
        pairs = SharedMemoryTransport("reader").pull(manifest)
    assert all(torch.equal(tensor, WHOLE) for _, tensor in pairs)  # copied together after the writers are gone


def test_publish_rejects_a_repeated_slice() -> None:
    with SharedMemoryTransport("shards") as writer, pytest.raises(StateDictError, match="'a' appears twice"):
        writer.publish(1, itertools.repeat(("a", rows(WHOLE, 0, 3)), 2))


def test_join_keeps_the_first_probes_and_rejects_mixed_versions() -> None:
    probe = Probe((1, 2), (-0.5,))
    with SharedMemoryTransport("shards") as one, SharedMemoryTransport("shards") as two:
        manifests = [
            replace(one.publish(1, [("a", rows(WHOLE, 0, 3))]), probes=(probe,), tolerance=0.25),
            two.publish(1, [("a", rows(WHOLE, 3, 6))]),
        ]
        joined = join(manifests)
        assert (joined.version, joined.probes, joined.tolerance) == (1, (probe,), 0.25)
        with pytest.raises(StateDictError, match=r"versions \[1, 2\]"):
            join([manifests[0], two.publish(2, [("a", rows(WHOLE, 3, 6))])])
        with pytest.raises(StateDictError, match=r"versions \[\]"):
            join([])

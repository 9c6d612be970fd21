"""Layouts of shards, which are sent once, and again if messages get lost."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan_rl.core.errors import StateDictError
from titan_rl.weights.manifest import KnownLayouts, ShardLayout, pack
from titan_rl.weights.types import Manifest, Shard, SlicePosition, TensorEntry


def entries(count: int) -> tuple[TensorEntry, ...]:
    position = SlicePosition((1, 0), (8, 4))
    return tuple(
        TensorEntry(f"w{i}", "bfloat16", (2, 4), 64 * i, 16, position if i % 2 else None) for i in range(count)
    )


def manifest(version: int, *counts: int) -> Manifest:
    return Manifest(version, tuple(Shard(f"/{version}/{i}", 64 * n, version, entries(n)) for i, n in enumerate(counts)))


def test_layout_equals_its_entries_after_pickling() -> None:
    layout = ShardLayout.of(entries(5))
    arrived = pickle.loads(pickle.dumps(layout))
    assert layout == entries(5) == arrived
    assert arrived.digest == layout.digest
    assert ShardLayout.of(arrived) is arrived


def test_different_layouts_have_different_digests() -> None:
    one, other = entries(2), (entries(2)[0], replace(entries(2)[1], offset=128))
    assert ShardLayout.of(one).digest != ShardLayout.of(other).digest


def test_layout_is_sent_only_once() -> None:
    known = KnownLayouts()
    first = pack(manifest(1, 300, 5), known.digests)
    assert known.unpack([pickle.loads(pickle.dumps(first))]) == [manifest(1, 300, 5)]
    second = pack(manifest(2, 300, 5), known.digests)
    assert not second.layouts
    assert len(pickle.dumps(second)) < 1000 < len(pickle.dumps(first))
    assert known.unpack([pickle.loads(pickle.dumps(second))]) == [manifest(2, 300, 5)]


def test_rejects_a_manifest_with_an_unknown_layout() -> None:
    known = KnownLayouts()
    known.unpack([pack(manifest(1, 3))])
    with pytest.raises(StateDictError, match="not known here"):
        known.unpack([pack(manifest(2, 4), pack(manifest(2, 4)).digests)])
    assert known.unpack([pack(manifest(3, 3), known.digests)]) == [manifest(3, 3)]


@given(st.lists(st.tuples(st.lists(st.integers(0, 3), min_size=1, max_size=3), st.booleans(), st.booleans())))
def test_manifests_are_complete_despite_lost_messages(calls: list[tuple[list[int], bool, bool]]) -> None:
    """The sender omits only layouts that the reader acknowledged, so lost messages and answers do no harm."""
    known, acknowledged = KnownLayouts(), frozenset[str]()
    for version, (counts, message_lost, answer_lost) in enumerate(calls):
        packed = pack(manifest(version, *counts), acknowledged)
        acknowledged = frozenset()
        if message_lost:
            continue
        assert known.unpack([packed]) == [manifest(version, *counts)]
        if not answer_lost:
            acknowledged = frozenset(packed.digests)

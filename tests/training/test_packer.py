from __future__ import annotations

from collections import Counter

from depth import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from titan_rl.training.family import Family
from titan_rl.training.packer import pack
from titan_rl.training.sample import TrainingSample


def family(length: int, name: str = "r") -> Family:
    zeros = [0.0] * length
    return Family((TrainingSample("g", name, [1] * length, [True] * length, zeros, zeros, [0] * length, 1.0),))


def name_of(family: Family) -> str:
    return family.samples[0].rollout_id


def test_the_longest_samples_meet_the_gaps_they_fit():
    packing = pack([family(n) for n in (3, 5, 6, 2)], row_tokens=8)
    assert sorted(packing.row_lengths) == [8, 8]
    assert packing.padding_fraction == 0


def test_a_sample_longer_than_a_row_is_dropped_and_reported():
    packing = pack([family(9), family(8)], row_tokens=8)
    assert [f.num_tokens for f in packing.dropped] == [9]
    assert packing.row_lengths == [8]


def test_rows_are_levelled_so_that_a_short_last_row_is_not_padding():
    packing = pack([family(10) for _ in range(12)], row_tokens=50)
    assert packing.row_lengths == [40, 40, 40]


def test_no_samples_give_no_rows():
    assert pack([], row_tokens=8).rows == []
    assert pack([], row_tokens=8).padding_fraction == 0


@given(st.lists(st.integers(1, 40), max_size=40), st.integers(1, 32))
def test_invariants(lengths: list[int], row_tokens: int):
    families = [family(length, name=str(index)) for index, length in enumerate(lengths)]
    packing = pack(families, row_tokens)
    placed = [name_of(f) for row in packing.rows for f in row] + [name_of(f) for f in packing.dropped]
    assert Counter(placed) == Counter(name_of(f) for f in families)
    assert all(0 < length <= row_tokens for length in packing.row_lengths)
    assert all(f.num_tokens > row_tokens for f in packing.dropped)
    if len(packing.rows) > 1:
        assert sum(packing.row_lengths) > len(packing.rows) * row_tokens / 2
    assert packing == pack(families, row_tokens)


@settings(max_examples=examples(25))
@given(st.lists(st.integers(20, 200), min_size=64, max_size=128))
def test_a_batch_of_conversations_has_at_most_five_percent_padding(lengths: list[int]):
    assert pack([family(length) for length in lengths], row_tokens=1024).padding_fraction <= 0.05

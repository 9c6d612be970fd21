from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from titan_rl.training.packer import pack
from titan_rl.training.sample import TrainingSample


def sample(length: int, name: str = "r") -> TrainingSample:
    zeros = [0.0] * length
    return TrainingSample("g", name, [1] * length, [True] * length, zeros, zeros, [0] * length, 1.0)


def test_the_longest_samples_meet_the_gaps_they_fit():
    packing = pack([sample(n) for n in (3, 5, 6, 2)], row_tokens=8)
    assert sorted(packing.row_lengths) == [8, 8]
    assert packing.padding_fraction == 0


def test_a_sample_longer_than_a_row_is_dropped_and_reported():
    packing = pack([sample(9), sample(8)], row_tokens=8)
    assert [len(s.token_ids) for s in packing.dropped] == [9]
    assert packing.row_lengths == [8]


def test_rows_are_levelled_so_that_a_short_last_row_is_not_padding():
    packing = pack([sample(10) for _ in range(12)], row_tokens=50)
    assert packing.row_lengths == [40, 40, 40]


def test_no_samples_give_no_rows():
    assert pack([], row_tokens=8).rows == []
    assert pack([], row_tokens=8).padding_fraction == 0


@given(st.lists(st.integers(1, 40), max_size=40), st.integers(1, 32))
def test_invariants(lengths: list[int], row_tokens: int):
    samples = [sample(length, name=str(index)) for index, length in enumerate(lengths)]
    packing = pack(samples, row_tokens)
    placed = [s.rollout_id for row in packing.rows for s in row] + [s.rollout_id for s in packing.dropped]
    assert Counter(placed) == Counter(s.rollout_id for s in samples)
    assert all(0 < length <= row_tokens for length in packing.row_lengths)
    assert all(len(s.token_ids) > row_tokens for s in packing.dropped)
    if len(packing.rows) > 1:
        assert sum(packing.row_lengths) > len(packing.rows) * row_tokens / 2
    assert packing == pack(samples, row_tokens)


@settings(max_examples=25)
@given(st.lists(st.integers(20, 200), min_size=64, max_size=128))
def test_a_batch_of_conversations_has_at_most_five_percent_padding(lengths: list[int]):
    assert pack([sample(length) for length in lengths], row_tokens=1024).padding_fraction <= 0.05

from __future__ import annotations

from collections import Counter

from depth import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from titan_rl.training.data.packing import Family, Packing, pack
from titan_rl.training.data.sample import TrainingSample


def family(length: int, name: str = "r") -> Family:
    zeros = [0.0] * length
    return Family((TrainingSample("g", name, [1] * length, [True] * length, zeros, zeros, [0] * length, 1.0),))


def row_lengths(packing: Packing) -> list[int]:
    return [sum(family.num_tokens for family in row) for row in packing.rows]


def padding_fraction(packing: Packing) -> float:
    """Fraction of padding when all rows are padded to the longest."""
    lengths = row_lengths(packing)
    return 1 - sum(lengths) / (len(lengths) * max(lengths))


def name_of(family: Family) -> str:
    return family.samples[0].rollout_id


def test_samples_are_packed_without_gaps():
    packing = pack([family(n) for n in (3, 5, 6, 2)], row_tokens=8)
    assert sorted(row_lengths(packing)) == [8, 8]
    assert padding_fraction(packing) == 0


def test_sample_longer_than_a_row_is_dropped_and_reported():
    packing = pack([family(9), family(8)], row_tokens=8)
    assert [f.num_tokens for f in packing.dropped] == [9]
    assert row_lengths(packing) == [8]


def test_rows_have_even_lengths():
    packing = pack([family(10) for _ in range(12)], row_tokens=50)
    assert row_lengths(packing) == [40, 40, 40]


def test_no_samples_give_no_rows():
    assert pack([], row_tokens=8).rows == []


@given(st.lists(st.integers(1, 40), max_size=40), st.integers(1, 32))
def test_every_sample_is_placed_once_or_dropped(lengths: list[int], row_tokens: int):
    families = [family(length, name=str(index)) for index, length in enumerate(lengths)]
    packing = pack(families, row_tokens)
    placed = [name_of(f) for row in packing.rows for f in row] + [name_of(f) for f in packing.dropped]
    assert Counter(placed) == Counter(name_of(f) for f in families)
    assert all(0 < length <= row_tokens for length in row_lengths(packing))
    assert all(f.num_tokens > row_tokens for f in packing.dropped)
    if len(packing.rows) > 1:
        assert sum(row_lengths(packing)) > len(packing.rows) * row_tokens / 2
    assert packing == pack(families, row_tokens)


def test_every_rank_gets_a_row():
    packing = pack([family(300) for _ in range(9)], row_tokens=1024, multiple_of=4)
    assert row_lengths(packing) == [900, 600, 600, 600]


def test_fewer_families_than_ranks_get_a_row_each():
    packing = pack([family(4), family(3), family(5)], row_tokens=16, multiple_of=4)
    assert sorted(row_lengths(packing)) == [3, 4, 5]


@settings(max_examples=examples(200))
@given(st.lists(st.integers(1, 1100), max_size=60), st.sampled_from([64, 500, 1024]), st.integers(2, 8))
def test_ranks_get_equal_numbers_of_rows(lengths: list[int], row_tokens: int, ranks: int):
    families = [family(length, name=str(index)) for index, length in enumerate(lengths)]
    packing, alone = pack(families, row_tokens, multiple_of=ranks), pack(families, row_tokens)
    placed = [name_of(f) for row in packing.rows for f in row] + [name_of(f) for f in packing.dropped]
    assert Counter(placed) == Counter(name_of(f) for f in families)
    assert all(0 < length <= row_tokens for length in row_lengths(packing))
    assert packing.dropped == alone.dropped
    fewest = len(alone.rows) + -len(alone.rows) % ranks
    num_fitting = len(lengths) - len(packing.dropped)
    assert len(packing.rows) == fewest if fewest <= num_fitting else len(packing.rows) <= num_fitting
    # No step takes longer than with the rows that one rank would have.
    assert max(row_lengths(packing), default=0) <= max(row_lengths(alone), default=0)


@settings(max_examples=examples(25))
@given(st.lists(st.integers(20, 200), min_size=64, max_size=128), st.integers(2, 4))
def test_padding_is_low_for_several_ranks(lengths: list[int], ranks: int):
    packing = pack([family(length) for length in lengths], row_tokens=1024, multiple_of=ranks)
    assert len(packing.rows) % ranks == 0
    assert padding_fraction(packing) <= 0.05


@settings(max_examples=examples(25))
@given(st.lists(st.integers(20, 200), min_size=64, max_size=128))
def test_padding_is_at_most_five_percent(lengths: list[int]):
    assert padding_fraction(pack([family(length) for length in lengths], row_tokens=1024)) <= 0.05

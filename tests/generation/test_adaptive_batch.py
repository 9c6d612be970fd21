"""Number of requests that join a batch, estimated from the lengths of earlier requests."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
from depth import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from titan_rl.generation.adaptive_batch import AdaptiveLimit, Growth, ObservedLengths

PROMPT = 100


def new(count: int, most: int = 10_000) -> list[Growth]:
    return [Growth(PROMPT, PROMPT, most)] * count


@pytest.mark.parametrize("share_interrupted", [0.0, 0.5])
def test_survival_estimate_is_accurate_despite_interruptions(share_interrupted: float) -> None:
    lengths, draws = ObservedLengths(20_000), random.Random(0)
    for _ in range(4000):
        start, end = PROMPT, PROMPT + round(draws.expovariate(1 / 1000))
        while draws.random() < share_interrupted and start < end:
            until = draws.randint(start, end)
            lengths.ended(Growth(start, until, 20_000), was_aborted=True)
            start = until  # it continues after its tokens so far
        lengths.ended(Growth(start, end, 20_000), was_aborted=False)
    (alive,) = lengths.survival([], new(1, 20_000))
    expected = np.exp(-lengths.horizon / 1000)
    assert np.abs(alive - expected).max() < 0.06


def test_long_running_requests_raise_the_survival_estimate() -> None:
    lengths = ObservedLengths(10_000)
    unknown = lengths.survival([], new(1))
    assert (lengths.survival([Growth(PROMPT, 9000, 10_000)] * 20, new(1)) >= unknown).all()


def test_survival_is_zero_beyond_the_maximum_length() -> None:
    lengths = ObservedLengths(10_000)
    (alive,) = lengths.survival([], [Growth(PROMPT, 400, 500)])
    assert not alive[lengths.horizon > 100].any()


def test_one_request_joins_an_empty_batch_regardless_of_its_size() -> None:
    adaptive_limit = AdaptiveLimit(8, kv_tokens=1000)
    huge = [Growth(990, 990, 1000)] * 3
    assert adaptive_limit.num_joining([], huge) == 1
    assert adaptive_limit.limit == 1
    assert adaptive_limit.num_joining(huge[:1], huge) == 0


def test_large_kv_cache_admits_up_to_the_maximum_batch() -> None:
    adaptive_limit = AdaptiveLimit(8, kv_tokens=1_000_000)
    assert adaptive_limit.num_joining([], new(5)) == 5
    assert adaptive_limit.num_joining(new(5), new(20)) == 3
    assert adaptive_limit.limit == 8


def test_shared_tokens_are_counted_once() -> None:
    adaptive_limit = AdaptiveLimit(64, kv_tokens=2000)
    running = new(12)
    assert adaptive_limit.num_joining(running, new(20), num_shared=11 * PROMPT) > adaptive_limit.num_joining(
        running, new(20)
    )


@settings(max_examples=examples(60), deadline=None)
@given(
    running=st.lists(st.tuples(st.integers(1, 500), st.integers(0, 500)), max_size=12),
    waiting=st.lists(st.integers(1, 500), min_size=1, max_size=12),
    most=st.integers(1, 16),
    kv_tokens=st.integers(1100, 20_000),
)
def test_joining_count_falls_with_load_and_rises_with_kv_size(
    running: list[tuple[int, int]], waiting: list[int], most: int, kv_tokens: int
) -> None:
    adaptive_limit = AdaptiveLimit(most, kv_tokens)
    grown = [Growth(start, start + more, 1100) for start, more in running[:most]]
    queue = [Growth(size, size, 1100) for size in waiting]
    counts = [adaptive_limit.num_joining(grown[:count], queue) for count in range(1, len(grown) + 1)]
    assert all(more >= fewer for more, fewer in pairwise(counts))
    count = adaptive_limit.num_joining(grown, queue)
    assert len(grown) + count <= adaptive_limit.limit <= most
    assert AdaptiveLimit(most, 2 * kv_tokens).num_joining(grown, queue) >= count

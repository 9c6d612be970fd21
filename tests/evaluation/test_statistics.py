"""Standard errors of means, compared with explicit formulas and with simulations."""

from __future__ import annotations

import math
import random
from itertools import combinations
from statistics import fmean, stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan_rl.core.clusters import repeated_prompts
from titan_rl.evaluation.statistics import averages_at_k, clustered_mean, difference, pass_at_k, passes_at_k

REWARD = st.floats(-10, 10)


@given(st.lists(st.lists(REWARD, min_size=3, max_size=3), min_size=2, max_size=8))
def test_standard_error_with_equal_groups_is_that_of_prompt_means(groups: list[list[float]]) -> None:
    estimate = clustered_mean(dict(enumerate(groups)))
    assert estimate is not None
    assert estimate.standard_error is not None
    means = [fmean(group) for group in groups]
    assert estimate.mean == pytest.approx(fmean(means), abs=1e-9)
    assert estimate.standard_error == pytest.approx(stdev(means) / math.sqrt(len(means)), abs=1e-9)


def test_copied_samples_do_not_reduce_the_standard_error() -> None:
    once = clustered_mean({"a": [0.0], "b": [1.0], "c": [1.0]})
    often = clustered_mean({"a": [0.0] * 9, "b": [1.0] * 9, "c": [1.0] * 9})
    assert once is not None
    assert often is not None
    assert often.standard_error == pytest.approx(once.standard_error)
    assert often.num_samples == 27


def test_standard_error_matches_the_spread_of_repeated_evaluations() -> None:
    draw = random.Random(0)

    def evaluation() -> dict[int, list[float]]:
        chances = [draw.random() for _ in range(30)]
        return {i: [float(draw.random() < chance) for _ in range(4)] for i, chance in enumerate(chances)}

    estimates = [clustered_mean(evaluation()) for _ in range(400)]
    reported = fmean(e.standard_error for e in estimates if e is not None and e.standard_error is not None)
    assert reported == pytest.approx(stdev(e.mean for e in estimates if e is not None), rel=0.1)


def test_single_prompt_has_no_error_and_no_prompts_no_mean() -> None:
    alone = clustered_mean({"a": [0.0, 1.0]})
    assert alone is not None
    assert (alone.mean, alone.standard_error, alone.num_prompts, alone.num_samples) == (0.5, None, 1, 2)
    assert clustered_mean({}) is None
    assert clustered_mean({"a": []}) is None


@given(st.integers(1, 7), st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_success(n: int, data: st.DataObject) -> None:
    right, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    subsets = list(combinations([i < right for i in range(n)], k))
    assert pass_at_k(n, right, k) == pytest.approx(fmean(any(subset) for subset in subsets))


def test_pass_and_avg_at_k_skip_prompts_with_too_few_samples() -> None:
    rewards = {"a": [1.0, 0.0], "b": [0.0, 0.0], "lost one": [1.0]}
    assert passes_at_k(rewards, 2, success=1.0) == {"a": [1.0], "b": [0.0]}
    assert averages_at_k(rewards, 2) == {"a": [0.5], "b": [0.0]}
    assert passes_at_k(rewards, 3, success=1.0) == {}
    with pytest.raises(ValueError, match="pass@3 needs at least 3"):
        pass_at_k(2, 1, 3)


def test_prompt_difficulty_cancels_in_a_paired_difference() -> None:
    first = {i: [float(i), float(i)] for i in range(10)}
    second = {i: [i + 0.5, i + 0.5] for i in range(10)}
    paired = difference(first, second)
    assert paired is not None
    assert (paired.mean, paired.num_paired) == (0.5, 10)
    assert paired.standard_error == pytest.approx(0.0, abs=1e-12)
    apart = difference(first, {f"other {i}": group for i, group in second.items()})
    assert apart is not None
    assert apart.standard_error is not None
    assert (apart.mean, apart.num_paired) == (0.5, 0)
    assert apart.standard_error > 1


@given(st.lists(st.tuples(REWARD, REWARD), min_size=2, max_size=8))
def test_paired_standard_error_is_that_of_the_differences(pairs: list[tuple[float, float]]) -> None:
    found = difference({i: [a] for i, (a, _) in enumerate(pairs)}, {i: [b] for i, (_, b) in enumerate(pairs)})
    differences = [b - a for a, b in pairs]
    assert found is not None
    assert found.mean == pytest.approx(fmean(differences), abs=1e-9)
    assert found.standard_error == pytest.approx(stdev(differences) / math.sqrt(len(pairs)), abs=1e-9)


def test_difference_uses_only_shared_prompts() -> None:
    found = difference({"a": [0.0], "b": [0.0], "only first": [9.0]}, {"a": [1.0], "b": [0.0], "only second": [9.0]})
    assert found is not None
    assert (found.mean, found.num_paired) == (0.5, 2)
    assert difference({"a": [1.0]}, {}) is None


def test_repeated_prompts_do_not_reduce_the_standard_error() -> None:
    distinct = {"a": [0.0, 1.0], "b": [1.0, 1.0], "c": [0.0, 0.0]}
    repeated = {f"{place}:{name}": group for place in range(8) for name, group in distinct.items()}
    clusters = {key: key.partition(":")[2] for key in repeated}
    once, often = clustered_mean(distinct), clustered_mean(repeated, clusters)
    assert once is not None
    assert often is not None
    assert (often.num_prompts, often.num_distinct, often.mean) == (24, 3, once.mean)
    assert often.standard_error == pytest.approx(once.standard_error)
    alone = clustered_mean({"0:a": [0.0], "1:a": [1.0]}, {"0:a": "a", "1:a": "a"})
    assert alone is not None
    assert (alone.standard_error, alone.num_distinct) == (None, 1)


def test_repeated_prompts_do_not_reduce_the_error_of_a_difference() -> None:
    first, second = {"a": [0.0], "b": [0.0], "c": [1.0]}, {"a": [1.0], "b": [0.0], "c": [0.0]}
    once = difference(first, second)
    keys = {f"{place}:{name}": name for place in range(8) for name in first}
    often = difference({k: first[n] for k, n in keys.items()}, {k: second[n] for k, n in keys.items()}, keys)
    assert once is not None
    assert often is not None
    assert (often.mean, often.num_paired, often.num_distinct) == (pytest.approx(once.mean), 24, 3)
    assert often.standard_error == pytest.approx(once.standard_error)


def test_few_distinct_prompts_are_warned_of_only_if_prompts_repeat() -> None:
    assert "the 64 held-out prompts are only 8 different ones" in (repeated_prompts(64, 8) or "")
    assert "no standard error" in (repeated_prompts(32, 1) or "")
    assert repeated_prompts(8, 8) is None
    assert repeated_prompts(64, 40) is None

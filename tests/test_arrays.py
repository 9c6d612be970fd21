"""Packed arrays behave like the lists that they were made from."""

import json
import math
import pickle
from array import array
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan_rl.core.arrays import (
    LOGPROBS,
    TOKENS,
    MaskArray,
    NumberArray,
    array_from_bytes,
    common_length,
    expert_rows,
    free_rows,
    joined_rows,
    logprob_array,
    token_array,
    version_array,
)
from titan_rl.core.plain_data import json_line
from titan_rl.types import Completion, FinishReason, VersionSpan

TOKEN_LISTS = st.lists(st.integers(0, 2**31 - 1), max_size=30)


@given(TOKEN_LISTS, TOKEN_LISTS, st.slices(30))
def test_token_array_behaves_like_its_list(tokens: list[int], more: list[int], part: slice) -> None:
    packed = token_array(tokens)
    assert packed == tokens
    assert tokens == packed
    assert packed == tuple(tokens)
    assert packed == array("q", tokens)
    assert packed != [*tokens, 1]
    assert packed[part] == tokens[part]
    assert list(packed) == packed.tolist() == tokens
    assert (len(packed), bool(packed)) == (len(tokens), bool(tokens))
    assert more + packed == [*more, *tokens]
    assert packed + more == [*tokens, *more]
    assert hash(packed) == hash(tuple(tokens))
    assert sorted([packed, token_array(more)]) == sorted([tokens, more])
    assert pickle.loads(pickle.dumps(packed)) == tokens
    assert array_from_bytes(TOKENS, packed.tobytes()) == tokens
    assert json.loads(json_line({"ids": packed})) == {"ids": tokens}
    assert np.asarray(packed).tolist() == tokens
    assert token_array(packed) is packed


def test_numpy_view_of_an_array_is_read_only() -> None:
    packed = logprob_array([-0.5, -1.5])
    copied = np.array(packed)
    copied += 1
    assert np.asarray(packed, np.float32).dtype == np.float32
    with pytest.raises(ValueError, match="read-only"):
        np.asarray(packed)[0] = 1
    assert packed == [-0.5, -1.5]


@given(st.lists(st.floats(), min_size=1, max_size=30))
def test_least_and_most_agree_with_the_list(values: list[float]) -> None:
    least, most = logprob_array(values).least(), logprob_array(values).most()
    if any(map(math.isnan, values)):
        assert math.isnan(least)
        assert math.isnan(most)
    else:
        assert (least, most) == (min(values), max(values))
    window = NumberArray(array(TOKENS, [3, 9, 4, 7]), 1, 3)
    assert (window.least(), type(window.least()), window.most()) == (4, int, 9)


@given(st.lists(st.floats(allow_nan=False), max_size=30))
def test_logprobs_round_trip_exactly(values: list[float]) -> None:
    packed = logprob_array(values)
    assert packed == values
    assert array_from_bytes(LOGPROBS, packed.tobytes()) == values
    assert packed.nbytes == 8 * len(values)


@given(TOKEN_LISTS, TOKEN_LISTS)
def test_common_length_is_that_of_the_shared_prefix(one: list[int], other: list[int]) -> None:
    found = common_length(token_array(one), token_array(other))
    assert one[:found] == other[:found]
    assert one[found : found + 1] != other[found : found + 1] or found == len(one) == len(other)
    assert common_length(token_array(one + other), token_array(one)) == len(one)


def test_window_is_unchanged_when_its_array_grows() -> None:
    line = array(TOKENS, [7, 8, 9])
    window = NumberArray(line, 1, 3)
    lent = np.asarray(window)
    line.extend([1] * 1000)
    assert window == [8, 9] == lent.tolist()
    assert (window[0], window[-1], list(window)) == (8, 9, [8, 9])
    with pytest.raises(IndexError):
        window[2]


def test_windows_on_one_array_are_pickled_with_one_copy() -> None:
    line = array(TOKENS, range(10_000))
    sent = pickle.dumps([NumberArray(line, 0, stop) for stop in range(9000, 9100)])
    assert len(sent) < 2 * line.itemsize * len(line)
    assert [len(window) for window in pickle.loads(sent)] == list(range(9000, 9100))


@pytest.mark.parametrize("tokens", [["a"], [0.5], [None]])
def test_invalid_tokens_are_rejected(tokens: list[object]) -> None:
    with pytest.raises(TypeError):
        token_array(tokens)  # pyright: ignore[reportArgumentType]
    with pytest.raises(OverflowError):
        token_array([2**31])


def test_version_array_expands_spans() -> None:
    assert version_array([(6, 3), (7, 0), (8, 2)]) == [6, 6, 6, 8, 8]


@given(st.lists(st.booleans(), max_size=20))
def test_mask_behaves_like_its_list(values: list[bool]) -> None:
    mask = MaskArray(bytes(values))
    assert mask == values
    assert mask.count(True) == sum(values)
    assert mask[1:] == values[1:]
    assert np.asarray(mask).tolist() == pickle.loads(pickle.dumps(mask)).tolist() == values


ROWS = st.lists(
    st.none() | st.lists(st.lists(st.integers(0, 200), min_size=2, max_size=2), min_size=3, max_size=3), min_size=1
)


@given(ROWS.filter(any))
def test_expert_rows_behave_like_their_lists(rows: list[list[list[int]] | None]) -> None:
    packed = expert_rows(rows)
    assert packed == rows
    assert [packed[place] for place in range(len(packed))] == rows
    assert pickle.loads(pickle.dumps(packed)) == rows
    assert joined_rows([packed[:1], packed[1:], free_rows(2, packed)]) == [*rows, None, None]
    assert len(packed.tobytes()) == 2 * 3 * 2 * len(rows)
    assert expert_rows(np.asarray(packed)[[row is not None for row in rows]]) == [row for row in rows if row]


@pytest.mark.parametrize("rows", [[[1, 2]], [[[1]], [[1], [2]]], [[[0.5]]], [[[70_000]]], [[["a"]]], [None]])
def test_invalid_expert_rows_are_rejected(rows: object) -> None:
    with pytest.raises(TypeError):
        expert_rows(rows)


def test_completions_are_equal_for_any_container_of_the_same_numbers():
    def made(container: Callable[[list[Any]], Any], last: float = -0.2) -> Completion:
        spans = [VersionSpan(0, 2)]
        return Completion(
            "a",
            container([5, 9]),
            container([-0.1, last]),
            FinishReason.STOP,
            spans,
            routed_experts=container([[[1]], [[0]]]),
        )

    packed = Completion("a", token_array([5, 9]), logprob_array([-0.1, -0.2]), FinishReason.STOP, (VersionSpan(0, 2),))
    containers = [list, tuple, np.asarray]
    for one in containers:
        for other in containers:
            assert made(one) == made(other)
            assert made(one) != made(other, -0.3)
        assert replace(made(one), routed_experts=None) == packed
        assert json.loads(json.dumps(list(packed.token_ids))) == packed.token_ids.tolist()  # pyright: ignore
    assert packed != "a"

"""Deterministic turns by weight."""

from __future__ import annotations

from collections import Counter
from itertools import islice

from hypothesis import given
from hypothesis import strategies as st

from titan_rl.scheduling.task_mix import Shares

WEIGHTS = st.lists(st.one_of(st.integers(1, 100), st.floats(1e-3, 1e3)).map(float), min_size=1, max_size=9).map(
    lambda weights: {f"task-{number}": weight for number, weight in enumerate(weights)}
)


def turns(shares: Shares):
    while True:
        name = shares.next()
        shares.take(name)
        yield name


@given(weights=WEIGHTS)
def test_every_task_stays_within_one_turn_of_its_share(weights: dict[str, float]):
    total, taken = sum(weights.values()), Counter[str]()
    for turn, name in enumerate(islice(turns(Shares(weights)), 300), start=1):
        taken[name] += 1
        assert all(abs(taken[name] - turn * weight / total) < 1 + 1e-9 for name, weight in weights.items())


@given(weights=WEIGHTS, pause=st.integers(0, 200))
def test_turns_continue_from_saved_counts(weights: dict[str, float], pause: int):
    undisturbed = list(islice(turns(Shares(weights)), 250))
    taken = Counter(undisturbed[:pause])
    assert list(islice(turns(Shares(weights, taken)), 250 - pause)) == undisturbed[pause:]


def test_turns_of_two_to_one_weights():
    assert "".join(islice(turns(Shares({"a": 2, "b": 1})), 9)) == "aabaabaab"

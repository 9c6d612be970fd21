"""League: which frozen version plays a group, and the results against each."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest

from titan_rl.scheduling.curriculum import InOrder
from titan_rl.tasks.league import LeagueCurriculum, LeagueSeat, matched_number, preference, split_number, win_rates


def league(**settings: Any) -> LeagueCurriculum:
    return LeagueCurriculum(InOrder(), LeagueSeat.model_validate({"league": "hard", **settings}), seed=0)


def deal(curriculum: LeagueCurriculum, state: dict[str, Any]) -> int | None:
    """Opponent of the next group."""
    number = curriculum.next_sample(state)
    assert curriculum.next_sample(state) == number, "the choice must not change when repeated"
    curriculum.given(state, number)
    return split_number(number)[1]


def play(curriculum: LeagueCurriculum, state: dict[str, Any], version: int, *rewards: float) -> None:
    curriculum.finished(state, matched_number(0, version), rewards)


def test_sample_number_encodes_the_opponent() -> None:
    assert split_number(matched_number(7, None)) == (7, None)
    assert split_number(matched_number(7, 0)) == (7, 0)
    assert split_number(matched_number(2**40 - 1, 2**22 - 1)) == (2**40 - 1, 2**22 - 1)
    assert matched_number(2**40 - 1, 2**22 - 1) < 2**63
    with pytest.raises(ValueError, match="at most"):
        matched_number(2**40, None)


def test_samples_stay_in_order_for_any_opponent() -> None:
    curriculum = league(self_play=0.5)
    state, samples = curriculum.begin(), []
    for _ in range(20):
        number = curriculum.next_sample(state)
        curriculum.given(state, number)
        samples.append(split_number(number)[0])
    assert samples == list(range(20))


def test_hard_preference_favours_strong_versions_with_a_self_play_share() -> None:
    curriculum = league(self_play=0.25)
    state = curriculum.begin()
    for version in (10, 20):
        curriculum.frozen(state, version)
    for _ in range(50):
        play(curriculum, state, 0, 1.0, 1.0)
        play(curriculum, state, 10, 1.0, -1.0)
        play(curriculum, state, 20, -1.0, -1.0)
    rates = win_rates(state)
    assert rates[0] > 0.95
    assert rates[10] == pytest.approx(0.5)
    assert rates[20] < 0.05
    dealt = Counter(deal(curriculum, state) for _ in range(2000))
    assert dealt[None] / 2000 == pytest.approx(0.25, abs=0.03)
    expected = {version: preference("hard", rate) for version, rate in rates.items()}
    for version, weight in expected.items():
        assert dealt[version] / 1500 == pytest.approx(weight / sum(expected.values()), abs=0.04)


def test_preference_weights() -> None:
    assert [preference("hard", p) for p in (0.0, 0.5, 1.0)] == [1.0, 0.25, 0.0]
    assert [preference("even", p) for p in (0.0, 0.5, 1.0)] == [0.0, 0.25, 0.0]
    assert [preference("uniform", p) for p in (0.0, 0.5, 1.0)] == [1.0, 1.0, 1.0]


def test_draws_count_half_and_self_play_is_ignored() -> None:
    curriculum = league(draw=0.5)
    state = curriculum.begin()
    play(curriculum, state, 0, 0.5, 1.0, 0.0, 0.5)
    assert state["versions"] == {"0": [1.0, 0.5]}
    curriculum.finished(state, matched_number(3, None), [1.0])
    play(curriculum, state, 0)  # all rollouts of the group were lost
    assert state["versions"] == {"0": [1.0, 0.5]}


def test_kept_versions_are_spread_from_first_to_newest() -> None:
    curriculum = league(keep=4)
    state = curriculum.begin()
    for version in range(10, 170, 10):
        curriculum.frozen(state, version)
    kept = [int(version) for version in state["versions"]]
    assert len(kept) == 4
    assert (kept[0], kept[-1]) == (0, 160)
    gaps = [after - before for before, after in pairwise(kept)]
    assert max(gaps) <= 80


def test_restored_state_continues_identically() -> None:
    curriculum = league(self_play=0.2)
    state = curriculum.begin()
    for version in (5, 10):
        curriculum.frozen(state, version)
        play(curriculum, state, version, 1.0, -1.0, 0.0)
    for _ in range(10):
        deal(curriculum, state)
    restored = json.loads(json.dumps(state))
    assert restored == state
    again = league(self_play=0.2)
    assert [deal(again, restored) for _ in range(30)] == [deal(curriculum, state) for _ in range(30)]


def test_result_against_an_unknown_version_adds_it() -> None:
    curriculum = league()
    state = curriculum.begin()
    curriculum.given(state, matched_number(0, 40))
    play(curriculum, state, 40, 1.0)
    curriculum.frozen(state, 40)  # when the step is trained again
    assert state["versions"] == {"0": [0.0, 0.0], "40": [1.0, 1.0]}

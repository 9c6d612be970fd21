"""Advantages: the two formulas, and groups that teach nothing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan_rl.rollout.advantages import BY_NAME, group_mean, standardized

rewards = st.lists(st.floats(-1e3, 1e3), max_size=16)


def test_formulas() -> None:
    assert group_mean([1.0, 0.0, 0.5, 0.5]) == [0.5, -0.5, 0.0, 0.0]
    assert standardized([2.0, 4.0, 6.0]) == pytest.approx([-1.22474, 0.0, 1.22474], abs=1e-4)
    assert standardized([1.0, 3.0], eps=1.0) == [-0.5, 0.5]


@pytest.mark.parametrize("advantage", BY_NAME.values())
@pytest.mark.parametrize("rewards", [[], [0.3], [0.1, 0.1, 0.1], [1e300, 1e300]])
def test_equal_rewards_have_zero_advantage(advantage: type, rewards: list[float]) -> None:
    assert advantage(rewards) == [0.0] * len(rewards)


@given(rewards)
def test_advantages_sum_to_zero_and_keep_the_order(rewards: list[float]) -> None:
    for advantage in BY_NAME.values():
        values = advantage(rewards)
        assert len(values) == len(rewards)
        assert sum(values) == pytest.approx(0.0, abs=1e-6 * max(1.0, *map(abs, values), 0.0)) if values else True
        order = sorted(range(len(rewards)), key=rewards.__getitem__)
        assert [values[i] for i in order] == sorted(values)

"""Advantages: the formulas, and groups that teach nothing."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan_rl.rollout.rewards.advantages import (
    AdvantageFn,
    batch_mean,
    compare_batch,
    group_mean,
    leave_one_out,
    reward,
    standardized,
)
from titan_rl.rollout.rewards.reward import SoftOverlong
from titan_rl.rollout.types import Rollout, RolloutGroup, Turn
from titan_rl.types import Completion, FinishReason, VersionSpan

COMPARING = [group_mean, leave_one_out, standardized]

rewards = st.lists(st.floats(-1e3, 1e3), max_size=16)


def test_formulas() -> None:
    assert group_mean([1.0, 0.0, 0.5, 0.5]) == [0.5, -0.5, 0.0, 0.0]
    assert standardized([2.0, 4.0, 6.0]) == pytest.approx([-1.22474, 0.0, 1.22474], abs=1e-4)
    assert standardized([1.0, 3.0], eps=1.0) == [-0.5, 0.5]


@pytest.mark.parametrize("advantage", COMPARING)
@pytest.mark.parametrize("rewards", [[], [0.3], [0.1, 0.1, 0.1], [1e300, 1e300]])
def test_equal_rewards_have_zero_advantage(advantage: AdvantageFn, rewards: list[float]) -> None:
    assert advantage(rewards) == [0.0] * len(rewards)


@given(rewards)
def test_advantages_sum_to_zero_and_keep_the_order(rewards: list[float]) -> None:
    for advantage in COMPARING:
        values = advantage(rewards)
        assert len(values) == len(rewards)
        assert sum(values) == pytest.approx(0.0, abs=1e-6 * max(1.0, *map(abs, values), 0.0)) if values else True
        order = sorted(range(len(rewards)), key=rewards.__getitem__)
        assert [values[i] for i in order] == sorted(values)


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=16))
def test_leave_one_out_is_the_distance_from_the_mean_of_the_others(rewards: list[float]) -> None:
    others = [np.mean(rewards[:i] + rewards[i + 1 :]) for i in range(len(rewards))]
    assert leave_one_out(rewards) == pytest.approx(np.array(rewards) - others, abs=1e-9)


def group_of(*rewards: float | None) -> RolloutGroup:
    rollouts = [Rollout(f"g/{i}", "g", i, None, reward=r, advantage=r) for i, r in enumerate(rewards)]
    return RolloutGroup("g", None, rollouts)


def test_a_baseline_of_the_whole_batch() -> None:
    assert batch_mean([1.0, 3.0]) == reward([1.0, 3.0]) == [1.0, 3.0]
    groups = [group_of(1.0, 3.0), group_of(5.0, None)]
    compare_batch(groups, batch_mean)
    assert [r.advantage for group in groups for r in group.rollouts] == [-2.0, 0.0, 2.0, None]
    compare_batch([], batch_mean)


@pytest.mark.parametrize(
    ("length", "penalty"), [(0, 0.0), (60, 0.0), (70, -0.25), (80, -0.5), (100, -1.0), (500, -1.0)]
)
def test_soft_overlong(length: int, penalty: float) -> None:
    completion = Completion("r", [1] * length, [0.0] * length, FinishReason.STOP, (VersionSpan(0, length),))
    rollout = Rollout("g/0", "g", 0, None, turns=[Turn([1], completion)])
    assert SoftOverlong(max_tokens=100, margin=40)(rollout) == penalty


def test_soft_overlong_needs_room_for_its_margin() -> None:
    with pytest.raises(ValueError, match="margin is 200; it must be between 1 and max_tokens, 100"):
        SoftOverlong(max_tokens=100, margin=200)

"""Advantages: formulas, baselines, and groups without a learning signal."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan_rl.core.errors import RewardError
from titan_rl.rollout.rewards.advantages import (
    AdvantageFn,
    batch_mean,
    compare,
    compare_batch,
    group_mean,
    leave_one_out,
    reward,
    role_baseline,
    standardized,
)
from titan_rl.rollout.rewards.reward import SoftOverlong
from titan_rl.rollout.types import Rollout, RolloutGroup, Turn
from titan_rl.scheduling.filters import too_few_siblings, too_long, zero_variance
from titan_rl.types import Completion, FinishReason, VersionSpan

COMPARING = [group_mean, leave_one_out, standardized]

rewards = st.lists(st.floats(-1e3, 1e3), max_size=16)


def test_advantage_formulas() -> None:
    assert group_mean([1.0, 0.0, 0.5, 0.5]) == [0.5, -0.5, 0.0, 0.0]
    assert standardized([2.0, 4.0, 6.0]) == pytest.approx([-1.22474, 0.0, 1.22474], abs=1e-4)
    assert standardized([1.0, 3.0], eps=1.0) == [-0.5, 0.5]


@pytest.mark.parametrize("advantage", COMPARING)
@pytest.mark.parametrize("rewards", [[], [0.3], [0.1, 0.1, 0.1], [1e300, 1e300]])
def test_equal_rewards_have_zero_advantage(advantage: AdvantageFn, rewards: list[float]) -> None:
    assert advantage(rewards) == [0.0] * len(rewards)


@pytest.mark.parametrize(
    "returned", [None, 1.0, "10", {0: 1.0, 1: 0.0}, {1.0, 0.5}, [1.0], [1.0, 0.0, 0.0], [1.0, "0"], [1.0, float("inf")]]
)
def test_invalid_result_of_an_advantage_function_is_named(returned: Any) -> None:
    def my_advantage(rewards: Sequence[float]) -> Any:
        return returned

    with pytest.raises(RewardError, match=r"'my_advantage' returned .* of group 'g'; it must return as many finite"):
        compare(group_of(1.0, 0.0), my_advantage)


def test_invalid_advantage_of_a_batch_is_named() -> None:
    class MyAdvantage:
        def __call__(self, rewards: Sequence[float]) -> Sequence[float]:
            return rewards

        def compare_batch(self, groups: Sequence[RolloutGroup]) -> None:
            groups[0].rollouts[1].advantage = "high"  # pyright: ignore[reportAttributeAccessIssue]

    with pytest.raises(RewardError, match="'MyAdvantage' assigned 'high' to rollout 'g/1' of a batch; it must be a"):
        compare_batch([group_of(1.0, 0.0)], MyAdvantage())


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


def test_batch_mean_subtracts_the_mean_of_the_batch() -> None:
    assert batch_mean([1.0, 3.0]) == reward([1.0, 3.0]) == [1.0, 3.0]
    groups = [group_of(1.0, 3.0), group_of(5.0, None)]
    compare_batch(groups, batch_mean)
    assert [r.advantage for group in groups for r in group.rollouts] == [-2.0, 0.0, 2.0, None]
    compare_batch([], batch_mean)


def games(*rewards: dict[str, float]) -> RolloutGroup:
    """Group with a game for each table of rewards by seat."""
    rollouts = [
        Rollout(f"g/{i}/{seat}", "g", i, None, reward=r, advantage=r, seat=seat)
        for i, of_game in enumerate(rewards)
        for seat, r in of_game.items()
    ]
    return RolloutGroup("g", None, rollouts)


def test_numbered_seats_are_compared_within_their_game() -> None:
    easy = {"proposer": 0.0, "solver.0": 1.0, "solver.1": 1.0}
    hard = {"proposer": 1.0, "solver.0": 1.0, "solver.1": 0.0}
    group = games(easy, hard)
    compare(group, group_mean)
    assert [rollout.advantage for rollout in group.rollouts] == [-0.5, 0.0, 0.0, 0.5, 0.5, -0.5]
    assert {rollout.role for rollout in group.rollouts} == {"proposer", "solver"}


def test_zero_variance_considers_numbered_seats() -> None:
    group = games({"proposer": 0.5, "solver.0": 1.0, "solver.1": 0.0}, {"proposer": 0.5, "solver.0": 0.0})
    assert (too_few_siblings(group), zero_variance(group)) == (None, None)
    alike = games({"solver.0": 1.0, "solver.1": 1.0}, {"solver.0": 0.0, "solver.1": 0.0})
    assert zero_variance(alike) == "zero_variance"


def test_reward_of_a_rollout_that_is_not_compared_is_no_variance() -> None:
    group = games({"": 1.0}, {"": 1.0}, {"": 0.0})
    group.rollouts[2].advantage = None  # it ended in a fault
    assert zero_variance(group) == "zero_variance"


def test_group_is_too_long_only_if_every_sibling_is() -> None:
    def of_lengths(*lengths: int) -> RolloutGroup:
        made = [
            Rollout(
                f"g/{i}",
                "g",
                i,
                None,
                turns=[Turn([0] * (length - 1), Completion("r", [1], [0.0], FinishReason.STOP, (VersionSpan(0, 1),)))],
            )
            for i, length in enumerate(lengths)
        ]
        return RolloutGroup("g", None, made)

    drop = too_long(10)
    assert (drop(of_lengths(10, 50)), drop(of_lengths(11, 50))) == (None, "too_long")


def test_each_role_has_its_own_moving_baseline() -> None:
    state: dict[str, float] = {}
    first = [games({"first": 1.0, "second": -1.0}, {"first": 3.0, "second": -3.0})]
    compare_batch(first, role_baseline, state)
    assert [rollout.advantage for rollout in first[0].rollouts] == [-1.0, 1.0, 1.0, -1.0]
    assert state == pytest.approx({"first": 0.95 * (0.95 * 2 + 0.05) + 0.15, "second": -(0.95 * 1.95 + 0.15)})
    before = dict(state)
    second = [games({"first": 5.0, "second": -5.0})]
    compare_batch(second, role_baseline, state)
    assert [rollout.advantage for rollout in second[0].rollouts] == [5.0 - before["first"], -5.0 - before["second"]]


@pytest.mark.parametrize(
    ("length", "penalty"), [(0, 0.0), (60, 0.0), (70, -0.25), (80, -0.5), (100, -1.0), (500, -1.0)]
)
def test_soft_overlong_penalty_grows_within_the_margin(length: int, penalty: float) -> None:
    completion = Completion("r", [1] * length, [0.0] * length, FinishReason.STOP, (VersionSpan(0, length),))
    rollout = Rollout("g/0", "g", 0, None, turns=[Turn([1], completion)])
    assert SoftOverlong(max_tokens=100, margin=40)(rollout) == penalty


def test_soft_overlong_margin_must_fit_into_max_tokens() -> None:
    with pytest.raises(ValueError, match="margin is 200; it must be between 1 and max_tokens, 100"):
        SoftOverlong(max_tokens=100, margin=200)

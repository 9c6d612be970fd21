"""Means over rollouts, which leave out and count values that are not numbers."""

from __future__ import annotations

import numpy as np
import pytest

from titan_rl import Completion, FinishReason, Rollout, RolloutGroup, RolloutStatus, Turn, VersionSpan
from titan_rl.run.observability.step_metrics import group_metrics, validation_metrics


class Scalar:
    """Like a torch scalar: not a float, but convertible to one."""

    def __init__(self, value: float) -> None:
        self._value = value

    def __float__(self) -> float:
        return self._value


def group_of(*metrics: dict, prompts: tuple[list[int], ...] = ([1],)) -> RolloutGroup:
    def turn(prompt: list[int]) -> Turn:
        return Turn(prompt, Completion("r", [9], [-0.5], FinishReason.STOP, [VersionSpan(0, 1)]))

    rollouts = [
        Rollout(f"g/{number}", "g", number, None, turns=[turn(p) for p in prompts], metrics=one, reward=1.0)
        for number, one in enumerate(metrics)
    ]
    return RolloutGroup("g", None, rollouts)


def test_non_numeric_values_are_left_out_of_means_and_counted():
    nan, inf = float("nan"), float("inf")
    group = group_of({"a": 1.0, "b": nan}, {"a": nan, "b": inf}, {"a": 3.0}, {"a": None}, {"a": "3"})
    metrics = group_metrics([group])
    assert metrics["rollout/metrics/a"] == 2.0
    assert "rollout/metrics/b" not in metrics
    assert metrics["rollout/values_left_out"] == 5.0


@pytest.mark.parametrize("scalar", [np.float32(3.0), np.int64(3), np.array(3.0), Scalar(3.0), True + 2])
def test_scalars_of_other_libraries_count_as_numbers(scalar: object):
    metrics = group_metrics([group_of({"a": scalar}, {"a": 1.0})])
    assert metrics["rollout/metrics/a"] == 2.0
    assert type(metrics["rollout/metrics/a"]) is float


def test_edited_history_counts_as_a_branch():
    assert group_metrics([group_of({}, prompts=([1], [1, 9, 2]))])["rollout/branches_per_rollout"] == 1.0
    assert group_metrics([group_of({}, prompts=([1], [5]))])["rollout/branches_per_rollout"] == 2.0


def test_environment_errors_are_excluded_from_the_mean_reward():
    group = group_of({}, {}, {})
    group.rollouts[0].status, group.rollouts[0].reward = RolloutStatus.ERROR_ENV, 0.0
    group.rollouts[1].status, group.rollouts[1].reward = RolloutStatus.ERROR_PARSE, 0.0
    assert group_metrics([group])["rollout/reward_mean"] == 0.5
    metrics = validation_metrics([group])
    assert metrics["validation/reward_mean"] == 0.5
    assert metrics["validation/unscored"] == 1.0


def test_reward_mean_is_reported_per_seat():
    def game(*chips: float) -> RolloutGroup:
        rollouts = [
            Rollout(f"g/{number}/{seat}", "g", number, None, reward=sign * won, seat=seat)
            for number, won in enumerate(chips)
            for seat, sign in (("first", 1), ("second", -1))
        ]
        return RolloutGroup("g", None, rollouts)

    metrics = group_metrics([game(2.0, 2.0), game(-1.0, 1.0)])
    assert metrics["rollout/reward_mean"] == 0.0
    assert metrics["rollout/seat/first/reward_mean"] == 1.0
    assert metrics["rollout/seat/second/reward_mean"] == -1.0
    assert metrics["rollout/zero_variance_groups"] == 0.5
    assert validation_metrics([game(2.0)])["validation/seat/first/reward_mean"] == 2.0


def test_constraint_metrics_require_a_constrained_rollout():
    def turn(allowed: list[float] | None) -> Turn:
        spans = [VersionSpan(0, 2)]
        return Turn([1], Completion("r", [9, 8], [-0.5, -0.5], FinishReason.STOP, spans, allowed_logprobs=allowed))

    free = Rollout("g/0", "g", 0, None, turns=[turn(None)])
    held = Rollout("g/1", "g", 1, None, turns=[turn([np.log(0.5), 0.0]), turn([np.log(0.25), np.log(0.5)])])
    metrics = group_metrics([RolloutGroup("g", None, [free, held])])
    assert metrics["rollout/constrained_fraction"] == 3 / 6
    assert metrics["rollout/constraint_weight_mean"] == pytest.approx(1 / 16)
    assert not {name for name in group_metrics([RolloutGroup("g", None, [free])]) if "constrain" in name}

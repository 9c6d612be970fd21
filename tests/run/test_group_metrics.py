"""Means over rollouts, which leave out and count values that are not numbers."""

from __future__ import annotations

import numpy as np
import pytest

from titan_rl import Completion, FinishReason, Rollout, RolloutGroup, RolloutStatus, Turn, VersionSpan
from titan_rl.core.calls.user_code import Failure
from titan_rl.run.observability.rollout_log import DroppedGroups
from titan_rl.run.observability.step_metrics import finished_figures, group_metrics, task_metrics, validation_metrics


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


def played(number: int, status: RolloutStatus, reward: float | None, turns: int, solved: float) -> Rollout:
    one = Turn([1], Completion("r", [9], [-0.5], FinishReason.STOP, [VersionSpan(0, 1)]))
    metrics = {"solved": solved, "retries": 2.0 - solved}
    breakdown = {"right": solved}
    return Rollout(
        f"g/{number}",
        "g",
        number,
        None,
        status,
        [one] * turns,
        reward=reward,
        metrics=metrics,
        reward_breakdown=breakdown,
    )


def faulty_group(task: str = "") -> RolloutGroup:
    """Two finished rollouts and two that a fault has ended, whose rubric has `error_reward=0.0`."""
    rollouts = [
        played(0, RolloutStatus.COMPLETED, 1.0, turns=4, solved=1.0),
        played(1, RolloutStatus.ERROR_PARSE, 0.0, turns=2, solved=1.0),
        played(2, RolloutStatus.ERROR_ENV, 0.0, turns=0, solved=0.0),
        played(3, RolloutStatus.ERROR_TIMEOUT, 0.0, turns=1, solved=0.0),
    ]
    return RolloutGroup("g", None, rollouts, task=task)


@pytest.mark.parametrize("prefix", ["rollout", "validation"])
def test_every_mean_leaves_out_faults_and_their_share_is_reported(prefix: str):
    groups = [faulty_group()]
    metrics = group_metrics(groups) if prefix == "rollout" else validation_metrics(groups)
    means = ("reward_mean", "reward/right", "completion_tokens_mean", "turns_mean", "metrics/solved")
    assert [metrics[f"{prefix}/{name}"] for name in means] == [0.5, 1.0, 3.0, 3.0, 1.0]
    assert metrics[f"{prefix}/fault_fraction"] == 0.5
    assert metrics[f"{prefix}/status/error_env"] == 0.25, "shares of statuses are of all rollouts"
    assert metrics[f"{prefix}/metrics/retries"] == 1.5, "the cost of faults counts"


def test_reward_of_finished_rollouts_leaves_out_faults_in_total_and_by_task():
    trained, dropped = faulty_group("sums"), faulty_group("games")
    figures = finished_figures([trained], [dropped])
    assert figures["rollout/finished_reward_mean"] == 0.5
    assert figures["rollout/finished_fault_fraction"] == 0.5
    dropped.rollouts[0].status = RolloutStatus.ERROR_GENERATE
    of_task = task_metrics("games", [trained], DroppedGroups([dropped]))
    assert (of_task["finished_reward_mean"], of_task["finished_fault_fraction"]) == (0.0, 0.75)
    of_task = task_metrics("sums", [trained], DroppedGroups([dropped]))
    assert (of_task["reward_mean"], of_task["turns_mean"], of_task["fault_fraction"]) == (0.5, 3.0, 0.5)


def test_groups_of_a_failed_reward_count_as_faults():
    lost = RolloutGroup("g", None, [played(0, RolloutStatus.COMPLETED, None, turns=4, solved=1.0)])
    lost.failure = Failure("ValueError: no", None, "")
    figures = finished_figures([faulty_group()], [lost])
    assert figures["rollout/finished_fault_fraction"] == 3 / 5
    assert validation_metrics([faulty_group(), lost])["validation/turns_mean"] == 3.0


def test_groups_with_faults_only_have_no_means():
    group = faulty_group()
    group.rollouts = group.rollouts[2:]
    metrics = group_metrics([group])
    assert not {name for name in metrics if "mean" in name}
    assert metrics["rollout/fault_fraction"] == 1.0

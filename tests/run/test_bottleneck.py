"""Bottleneck of a run, derived from its metrics."""

from __future__ import annotations

from typing import Any

import pytest

from titan_rl.metrics.bottleneck import ADVICE, bottleneck, parts_of
from titan_rl.metrics.table import METRICS

STEP = {
    "time/wait_for_rollouts_s": 6.0,
    "time/samples_s": 0.5,
    "time/train_s": 3.0,
    "sync/wait_for_pull_s": 0.25,
    "sync/begin_publish_s": 0.25,
    "engine/idle_share": 0.1,
    "rollout/metrics/env_seconds": 3.0,
    "rollout/metrics/reward_seconds": 1.0,
}


@pytest.mark.parametrize(
    ("changes", "name", "share"),
    [
        ({}, "generation", 0.6),
        ({"engine/idle_share": 0.9}, "environments", 0.375),
        ({"engine/idle_share": 0.9, "rollout/metrics/env_seconds": 0.0}, "rewards", 0.5),
        ({"engine/idle_share": 0.9, "rollout/metrics/teacher_seconds": 16.0}, "the teacher", 0.5 * 16 / 20),
        ({"time/train_s": 30.0}, "training", 30.5 / 37.0),
        ({"sync/wait_for_pull_s": 30.0}, "weight sync", 30.25 / 39.75),
        ({"time/validation_s": 30.0}, "validation", 0.75),
        ({"time/checkpoint_s": 30.0}, "checkpoints", 0.75),
        ({"engine/idle_share": None, "rollout/metrics/env_seconds": None}, "generation", 0.6),
    ],
)
def test_bottleneck_of_a_step(changes: dict[str, Any], name: str, share: float):
    found = bottleneck([STEP | changes])
    assert found is not None
    assert (found.name, found.share) == (name, pytest.approx(share))
    assert ADVICE[name] in found.sentence
    assert f"{share:.0%}" in found.sentence
    assert sum(parts_of(STEP | changes).values()) == pytest.approx(
        sum(value or 0.0 for name, value in (STEP | changes).items() if name.startswith(("time/", "sync/")))
    )


def test_bottleneck_of_a_run_combines_all_steps():
    found = bottleneck([STEP, {"validation/reward_mean": 0.5}, STEP | {"time/train_s": 20.0}])
    assert found is not None
    assert (found.name, found.share) == ("training", pytest.approx(24.0 / 37.0))


def test_no_bottleneck_without_time_metrics():
    assert bottleneck([{"time/step_s": 3.0}, {"train/loss": 1.0}]) is None
    assert bottleneck([]) is None


def test_bottleneck_metrics_are_in_the_metric_table():
    assert {metric.name for metric in METRICS} >= {*STEP, "time/validation_s", "time/checkpoint_s"}

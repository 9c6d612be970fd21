"""Schedules in virtual time: their speed and their guarantees."""

import time
from dataclasses import replace

import pytest

from benchmarks.simulation import Cluster, SimulationResult, Workload, equal, log_normal_with_tail, simulate
from titan_rl.core.errors import ConfigError
from titan_rl.generation.scripted_engine import CostModel
from titan_rl.scheduling.settings import SchedulingConfig

ENGINES = Cluster(4, CostModel(step=0.02, request=0.0002, load=0.5), max_running=16)
LONG_TAIL = Workload(log_normal_with_tail(median=200, sigma=0.5, cap=8000), group_size=4)


def run(workload: Workload, cluster: Cluster = ENGINES, *, num_steps: int = 6, **knobs: object) -> SimulationResult:
    return simulate(workload, cluster, SchedulingConfig(groups_per_step=16, **knobs), num_steps=num_steps, warmup=2)  # pyright: ignore


def test_streaming_neither_waits_for_the_tail_nor_drops_it():
    synchronous = run(LONG_TAIL, max_staleness=0)
    streaming = run(LONG_TAIL, max_staleness=0, oversample=1.0)
    assert set(synchronous.ages) == {0}
    assert streaming.mean_step_s < 0.6 * synchronous.mean_step_s
    assert streaming.wasted_tokens == 0
    assert max(streaming.accepted_lengths) > 7000


def test_streaming_gains_nothing_from_equal_lengths():
    workload = Workload(equal(500), group_size=4)
    ratio = run(workload, max_staleness=0).mean_step_s / run(workload, max_staleness=0, oversample=1.0).mean_step_s
    assert 0.9 < ratio < 1.1


def test_requests_move_without_wasting_tokens():
    alone, moving = (Cluster(4, ENGINES.cost, max_running=16, move_below=below) for below in (None, 0.5))
    assert run(LONG_TAIL, alone, max_staleness=0, num_steps=1).moved == 0
    moved = run(LONG_TAIL, moving, max_staleness=0, num_steps=1)
    assert moved.moved > 0
    assert set(moved.ages) == {0}
    assert moved.wasted_tokens == 0
    assert sorted(moved.accepted_lengths) == sorted(run(LONG_TAIL, max_staleness=0, num_steps=1).accepted_lengths)


def test_lent_engines_shorten_steps_without_wasting_tokens():
    lending = Cluster(2, ENGINES.cost, max_running=16, train_s=5.0, num_lent=2, move_below=0.8)
    alone, lent = (run(LONG_TAIL, replace(lending, num_lent=count), max_staleness=0, num_steps=1) for count in (0, 2))
    assert lent.moved > alone.moved
    assert lent.wasted_tokens == 0
    assert set(lent.ages) == {0}
    assert lent.mean_step_s < alone.mean_step_s


@pytest.mark.parametrize("mode", ["keep", "abort", "sleep"])
@pytest.mark.parametrize("tail", ["carry_over", "tail_batch"])
def test_interrupted_rollouts_resume_within_the_staleness_bound(mode, tail):
    colocated = Cluster(4, ENGINES.cost, max_running=16, train_s=10.0, logprob_s=2.0, colocated=True)
    knobs = {"max_staleness": 1, "oversample": 0.5, "on_batch_ready": mode, "tail": tail}
    result = run(LONG_TAIL, colocated, num_steps=3, **knobs)
    assert max(result.ages) <= SchedulingConfig(groups_per_step=16, **knobs).age_bound  # pyright: ignore
    assert max(result.ages) > 0
    assert result.wasted_tokens == 0
    assert result.mean_step_s >= 12.0


def test_dropping_the_tail_biases_the_lengths():
    biased = run(LONG_TAIL, max_staleness=0, oversample=1.0, window=64, tail="drop")
    assert biased.length_bias < 0.8


def test_simulating_an_hour_takes_seconds():
    began = time.process_time()
    slow = Cluster(4, CostModel(step=0.3, request=0.003, load=0.5), max_running=16)
    assert sum(run(LONG_TAIL, slow, max_staleness=1, num_steps=5).step_s) > 3600
    assert time.process_time() - began < 60


def test_same_seed_gives_the_same_result():
    assert run(LONG_TAIL, max_staleness=1, num_steps=3) == run(LONG_TAIL, max_staleness=1, num_steps=3)


def test_colocated_cluster_cannot_generate_while_it_trains():
    colocated = Cluster(4, ENGINES.cost, train_s=10.0, colocated=True)
    with pytest.raises(ConfigError, match="on_batch_ready"):
        run(LONG_TAIL, colocated, max_staleness=1)


def test_sleeping_engines_wake_once_per_step():
    def step_s(wake_s: float) -> float:
        colocated = Cluster(4, ENGINES.cost, max_running=16, train_s=10.0, wake_s=wake_s, colocated=True)
        return run(Workload(equal(200), group_size=4), colocated, max_staleness=0, on_batch_ready="sleep").mean_step_s

    assert step_s(3.0) - step_s(0.0) == pytest.approx(3.0, abs=0.01)


def test_generator_idle_share_covers_only_measured_steps():
    """Even if an engine is in the middle of its steps when the measurement begins."""
    busy = Workload(log_normal_with_tail(median=300, sigma=0.5, cap=4096), group_size=8)
    cluster = Cluster(4, CostModel(step=0.02, request=0.0002), max_running=64, train_s=20.0)
    settings = SchedulingConfig(groups_per_step=32, oversample=0.5)
    result = simulate(busy, cluster, settings, num_steps=4, warmup=2)
    assert result.generators_idle == pytest.approx(0.0, abs=0.2)
    assert result.generators_idle >= 0


@pytest.mark.parametrize("num_lent", [0, 1, 4])
def test_idle_shares_account_for_lent_engines(num_lent):
    """With equal lengths all engines have the same work, so only the time to lend and return them remains."""
    cluster = Cluster(4, CostModel(step=0.02), max_running=64, train_s=30.0, num_lent=num_lent, move_below=0.5)
    result = run(Workload(equal(400), group_size=4), cluster, max_staleness=0, num_steps=3)
    used_s = result.mean_step_s - 30.0
    assert result.trainer_idle == pytest.approx(used_s / result.mean_step_s, abs=0.01)
    out = num_lent / 4 * used_s
    assert result.generators_idle == pytest.approx(30.0 / (result.mean_step_s + out), abs=0.02)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_replicas": 0}, "Cluster.num_replicas is 0; it must be at least 1"),
        ({"max_running": 0}, "Cluster.max_running is 0; it must be at least 1"),
        ({"kv_tokens": 0}, "Cluster.kv_tokens is 0; it must be at least 1"),
        ({"num_lent": -1}, "Cluster.num_lent is -1; it must be at least 0"),
        ({"train_s": -5.0}, "Cluster.train_s is -5.0; it must be finite and >= 0"),
        ({"wake_s": float("nan")}, "Cluster.wake_s is nan; it must be finite and >= 0"),
        ({"colocated": True, "num_lent": 2}, "Cluster.num_lent is 2, and on a colocated .*; set num_lent = 0, or"),
    ],
)
def test_invalid_cluster_is_rejected(given, message):
    with pytest.raises(ConfigError, match=message):
        replace(ENGINES, **given)


def test_empty_simulation_is_rejected():
    with pytest.raises(ConfigError, match=r"Workload.group_size is 1; it must be at least 2"):
        Workload(equal(50), group_size=1)
    with pytest.raises(ConfigError, match="num_steps is 0; it must be at least 1"):
        run(LONG_TAIL, num_steps=0)
    with pytest.raises(ConfigError, match="warmup is -1; it must be at least 0"):
        simulate(LONG_TAIL, ENGINES, SchedulingConfig(groups_per_step=16), num_steps=1, warmup=-1)


def test_request_larger_than_the_kv_cache_is_rejected():
    short, steps = Workload(equal(44), group_size=2), {"num_steps": 1, "max_staleness": 0}
    with pytest.raises(ConfigError, match="kv_tokens is 299, and the longest request has 300 tokens; set it"):
        run(short, replace(ENGINES, kv_tokens=299), **steps)
    assert run(short, replace(ENGINES, kv_tokens=300), **steps).wasted_tokens == 0

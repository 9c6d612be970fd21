"""Processor time of a run between two steps, of processes that only report numbers."""

from __future__ import annotations

import pytest

from titan_rl.cluster.liveness.health_check import ProcessorTime
from titan_rl.cluster.processes.roles import Role
from titan_rl.metrics.waterfall import waterfall
from titan_rl.run.observability.processor_meter import ProcessorMeter
from titan_rl.testing.clock import ManualClock


class Processes:
    num_cores = 4

    def __init__(self) -> None:
        self.times = {Role.GENERATOR: ProcessorTime(100.0, 50.0)}

    def processor_times(self) -> dict[Role, ProcessorTime]:
        return self.times


def test_meter_counts_from_the_previous_call():
    processes, clock = Processes(), ManualClock()
    meter = ProcessorMeter(processes, clock)
    clock.seconds += 2.0
    processes.times = {Role.GENERATOR: ProcessorTime(103.0, 52.0), Role.TRAINER: ProcessorTime(1.5, 1.0)}
    metrics = meter.take_metrics()
    assert metrics.pop("processor/controller_s") >= 0
    assert metrics == {
        "processor/available_s": 8.0,
        "processor/generators_s": 3.0,
        "processor/engine_steps_s": 2.0,
        "processor/trainer_s": 1.5,
        "processor/trainer_steps_s": 1.0,
    }
    clock.seconds += 1.0
    again = meter.take_metrics()
    assert again["processor/available_s"] == 4.0
    assert again["processor/generators_s"] == again["processor/trainer_steps_s"] == 0


def test_meter_waits_for_the_first_report_of_a_process():
    processes, clock = Processes(), ManualClock()
    processes.times = {}
    meter = ProcessorMeter(processes, clock)
    clock.seconds += 1.0
    assert meter.take_metrics() == {}
    processes.times = {Role.TRAINER: ProcessorTime(1.5, 1.0)}
    clock.seconds += 1.0
    assert meter.take_metrics()["processor/available_s"] == 8.0


def test_meter_without_processes_measures_nothing():
    assert ProcessorMeter(None).take_metrics() == {}


def test_waterfall_adds_up_to_the_time_of_all_cores():
    parts = waterfall(
        {
            "processor/available_s": 20.0,
            "processor/engine_steps_s": 4.0,
            "processor/generators_s": 5.0,
            "processor/trainer_steps_s": 3.0,
            "processor/trainer_s": 3.5,
            "processor/controller_s": 1.0,
        }
    )
    assert parts == {
        "engine steps": 4.0,
        "trainer steps": 3.0,
        "generators, besides steps": 1.0,
        "trainer, besides steps": 0.5,
        "controller": 1.0,
        "idle, or used by other programs": 10.5,
    }


@pytest.mark.parametrize("late", ["processor/trainer_steps_s", "processor/trainer_s"])
def test_waterfall_has_no_negative_part_if_a_report_is_late(late: str):
    seconds = {"processor/available_s": 2.0, "processor/trainer_s": 1.0, "processor/trainer_steps_s": 1.0}
    parts = waterfall(seconds | {late: 3.0})
    assert min(parts.values()) == 0


def test_waterfall_of_a_run_without_the_metrics_is_empty():
    assert waterfall({"processor/trainer_s": 1.0}) == {}

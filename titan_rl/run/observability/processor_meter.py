"""Meter of the processor time of a run's processes, for the metrics of each step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from titan_rl.cluster.liveness.health_check import ProcessorTime, own_processor_s
from titan_rl.cluster.processes.roles import Role
from titan_rl.core.clock import CLOCK, Clock


class ProcessorSource(Protocol):
    """Processes of a run whose processor time is measured."""

    @property
    def num_cores(self) -> int:
        """Number of processor cores that they may use."""
        ...

    def processor_times(self) -> Mapping[Role, ProcessorTime]:
        """Processor time so far by role. It never decreases."""
        ...


_NAMES = {Role.GENERATOR: "generators", Role.TRAINER: "trainer", Role.ROLLOUT_WORKER: "rollout_workers"}
_STEPS = {Role.GENERATOR: "engine_steps", Role.TRAINER: "trainer_steps"}


class ProcessorMeter:
    """Measures the processor time of this process and of a run's other processes.

    Each process reports its time once a second, so the values of one short step are approximate, but not their sums.

    Args:
        source: The other processes. None measures nothing, because generators and trainer may then share this process.
    """

    def __init__(self, source: ProcessorSource | None, clock: Clock = CLOCK) -> None:
        self._source = source
        self._clock = clock
        self._taken_at = clock.now()
        self._times = dict(source.processor_times()) if source else {}
        self._own_s = own_processor_s()

    def take_metrics(self) -> dict[str, float]:
        """Return the metrics of the time since the previous call, in core seconds.

        Returns:
            processor/available_s, the time of all cores; processor/controller_s, that of this process; and for each
            role with processes their time, as processor/generators_s, and the part of it that is work, as
            processor/engine_steps_s. Empty without a source, and as long as no process has reported its time: what
            the processes used would seem to be idle.
        """
        if self._source is None or not (times := self._source.processor_times()):
            return {}
        now, own_s = self._clock.now(), own_processor_s()
        metrics = {
            "processor/available_s": self._source.num_cores * (now - self._taken_at),
            "processor/controller_s": own_s - self._own_s,
        }
        for role, name in _NAMES.items():
            if role not in times:
                continue
            used = times[role] - self._times.get(role, ProcessorTime())
            metrics[f"processor/{name}_s"] = used.total_s
            if role in _STEPS:
                metrics[f"processor/{_STEPS[role]}_s"] = used.work_s
        self._taken_at, self._times, self._own_s = now, dict(times), own_s
        return metrics

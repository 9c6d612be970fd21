"""Status of generation: progress, in-flight requests, and metrics of the generators."""

from __future__ import annotations

from collections.abc import Mapping

from titan_rl.cluster.hosts.cores import plural
from titan_rl.cluster.hosts.lifecycle import HostHistory
from titan_rl.generation.router.router import GeneratorRouter
from titan_rl.generation.types import GaugeSummary
from titan_rl.rollout.group.running_groups import Waits
from titan_rl.run.terminal.live_display import SLOT_STYLES, RunLook
from titan_rl.scheduling.lease import GroupState


class GenerationStatus:
    """Status of generation: its progress, and its metrics for the time between two steps.

    Args:
        num_generators: Number of generators of the run, including those that do not serve.
        hosts: Source of reports of joining, draining and lost hosts.
    """

    def __init__(self, router: GeneratorRouter, num_generators: int, hosts: HostHistory | None = None) -> None:
        self._router = router
        self._num_generators = num_generators
        self._hosts = hosts or HostHistory()
        self._num_moved = 0

    def progress(self) -> object:
        """Value that changes with every token and answer."""
        return self._router.num_answered, self._router.num_tokens_so_far

    def take_metrics(self, version: int) -> dict[str, float]:
        """Return the metrics of the time since the last call.

        Args:
            version: Version that the generators have pulled at the end of that time. Generators at other versions are
                left out.

        Returns:
            generation/requests_in_flight_max; generation/moved_requests, if requests may move; engine/<name>_mean,
            engine/<name>_max and engine/<count>, if the engines report gauges (see `GaugeSummary.metrics`);
            engine/idle_share, the idle share of all engines' time, if they report idle time; and the metrics of
            `HostHistory.take_metrics`.
        """
        replicas = [replica for replica in self._router.replicas if replica.version == version]
        gauges = GaugeSummary.metrics(replica.gauges for replica in replicas if replica.gauges is not None)
        if total := gauges.get("idle_s", 0.0) + gauges.get("busy_s", 0.0):
            gauges["idle_share"] = gauges["idle_s"] / total
        return {
            "generation/requests_in_flight_max": float(self._router.take_most_in_flight()),
            **self._moved_metrics(),
            **{f"engine/{name}": value for name, value in gauges.items()},
            **self._hosts.take_metrics(),
        }

    def _moved_metrics(self) -> dict[str, float]:
        if (num_moved := self._router.num_moved) is None:
            return {}
        before, self._num_moved = self._num_moved, num_moved
        return {"generation/moved_requests": float(num_moved - before)}

    def look(self, slots: Mapping[GroupState, int], running: Mapping[str, int], version: int) -> RunLook:
        """Take a snapshot for the live display.

        Args:
            slots: Number of slots by the state of their groups.
            running: Number of running groups by state. Suspended groups count as generating.
            version: Version of the trainer.
        """
        suspended = slots.get(GroupState.SUSPENDED, 0)
        states = {
            "waiting": slots.get(GroupState.PENDING, 0),
            **running,
            "generating": max(running.get("generating", 0) - suspended, 0),
            "suspended": suspended,
            "finished": slots.get(GroupState.DONE, 0),
            "training": slots.get(GroupState.TRAINING, 0),
        }
        return RunLook(
            {state: states.get(state, 0) for state in SLOT_STYLES},
            self._router.replicas,
            version,
            self._hosts.look(),
        )

    def waits_for(self, waits: Waits) -> list[str]:
        """Describe the state of generation, for messages about a stalled run.

        Args:
            waits: Groups that wait for something else.
        """
        serving = [replica.name for replica in self._router.replicas if replica.serving]
        errors = [f"{replica.name}: {replica.last_error}" for replica in self._router.replicas if replica.last_error]
        elsewhere = [
            f"{plural(count, 'group')} waiting for {part}, the longest for {seconds:.0f} s"
            for part, (count, seconds) in waits.items()
        ]
        return [
            f"{self._router.num_in_flight} requests are in flight",
            *elsewhere,
            f"{len(serving)} of {self._num_generators} generators serve",
            *errors,
        ]

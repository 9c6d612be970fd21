"""What generation is doing: whether anything happens, what a run waits for, and what a step's metrics say of it."""

from __future__ import annotations

from titan_rl.generation.router.router import GeneratorRouter
from titan_rl.generation.types import GaugeSummary
from titan_rl.run.observability.peak import Peak


class Activity:
    """What a `Standstill` looks at, and what is measured of generation between two steps.

    Args:
        requests: in flight.
        num_generators: of the run, whether or not they serve.
    """

    def __init__(self, router: GeneratorRouter, requests: Peak, num_generators: int) -> None:
        self._router = router
        self._requests = requests
        self._num_generators = num_generators

    def progress(self) -> object:
        """Differs once a token or an answer has come."""
        tokens = sum(len(answer.token_ids) for answer in self._router.tokens_so_far().values())
        return self._requests.num_done, tokens

    def take_metrics(self, version: int) -> dict[str, float]:
        """Of the time since this was last called.

        Args:
            version: that the generators have pulled at its end. Those that have not are left out.

        Returns:
            generation/requests_in_flight_max; engine/<name>_mean, engine/<name>_max and engine/<count>, see
            `GaugeSummary.metrics`, where the engines report gauges.
        """
        replicas = [replica for replica in self._router.replicas if replica.version == version]
        gauges = GaugeSummary.metrics(replica.gauges for replica in replicas if replica.gauges is not None)
        return {
            "generation/requests_in_flight_max": float(self._requests.take()),
            **{f"engine/{name}": value for name, value in gauges.items()},
        }

    def waits_for(self) -> list[str]:
        """What generation has to do, as far as that is known."""
        serving = [replica.name for replica in self._router.replicas if replica.serving]
        errors = [f"{replica.name}: {replica.last_error}" for replica in self._router.replicas if replica.last_error]
        elsewhere = "" if self._requests.now else " (rollouts wait for environments, agents, harnesses or rewards)"
        return [
            f"{self._requests.now} requests are in flight{elsewhere}",
            f"{len(serving)} of {self._num_generators} generators serve",
            *errors,
        ]

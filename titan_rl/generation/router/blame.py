"""Is it the replica or the request? One request that no engine can bear must not take all of them out of service."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from titan_rl.calls import stopwatch
from titan_rl.errors import EngineDeadError, EngineStalledError, RequestError
from titan_rl.generation.router.health import Health
from titan_rl.generation.router.in_flight import RequestInFlight
from titan_rl.generation.router.pool import PooledReplica


@dataclass(frozen=True, slots=True)
class FailedAttempt:
    """One attempt of a request that failed."""

    replica: PooledReplica
    epoch: int  # the replica's, when the attempt began
    error: Exception
    num_served: int  # signs of service to other requests, when it failed

    @property
    def outlived(self) -> bool:
        """The replica has served others since."""
        return self.replica.num_served > self.num_served

    @property
    def may_be_outlived(self) -> bool:
        return self.outlived or self.replica.num_requests > 0


class Blame:
    """Who is at fault in a request's failures.

    The first is laid to the replica, which leaves service for a moment at least; that of an engine that ended or hangs
    always is. If the request fails in the same way again, and those that failed it go on to serve others, it is the
    request's fault: it fails alone, and the last replica stays in service. While they have no others to serve, nobody
    can tell, and nobody else is hurt.

    Args:
        wait_s: how long the replicas have to serve others.
    """

    def __init__(self, health: Health, wait_s: float) -> None:
        self._health = health
        self._wait_s = wait_s

    async def lay(self, request: RequestInFlight, failures: list[FailedAttempt]) -> None:
        """Say who is at fault in the last of a request's failures, and act on it.

        Raises:
            RequestError: it is the request's fault.
        """
        last = failures[-1]
        alike = [failure for failure in failures if type(failure.error) is type(last.error)]
        is_lost = isinstance(last.error, EngineDeadError | EngineStalledError)
        if len(alike) > 1 and not is_lost and all(failure.may_be_outlived for failure in alike):
            try:
                with stopwatch.paused():
                    await request.within(None, asyncio.sleep(self._wait_s))
            except TimeoutError:
                return  # the request is aborted, or the router closed
            if all(failure.outlived for failure in alike):
                names = ", ".join(failure.replica.name for failure in alike)
                raise RequestError(
                    f"request {request.request_id!r} failed {len(alike)} times in the same way, on {names}, which went "
                    f"on to serve others: {last.error!r}"
                ) from last.error
        self._health.quarantine(last.replica, last.error, last.epoch)

"""Is it the replica or the request? One request that no engine can bear must not take all of them out of service."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from titan_rl.core.calls import stopwatch
from titan_rl.core.errors import EngineDeadError, EngineStalledError, RequestError
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
    always is. If the request fails in the same way on another replica, or on the same one in all attempts that it has,
    and those that failed it go on to serve others, it is the request's fault: it fails alone, and the last replica
    stays in service. Before that, failures on one replica are that replica's, which may be flaky. While they have no
    others to serve, nobody can tell, and nobody else is hurt.

    Args:
        wait_s: how long the replicas have to serve others.
        max_attempts: failures of a request that are its last.
    """

    def __init__(self, health: Health, wait_s: float, max_attempts: int) -> None:
        self._health = health
        self._wait_s = wait_s
        self._max_attempts = max_attempts

    async def lay(self, request: RequestInFlight, failures: list[FailedAttempt]) -> None:
        """Say who is at fault in the last of a request's failures, and act on it.

        Raises:
            RequestError: it is the request's fault.
        """
        last = failures[-1]
        alike = [failure for failure in failures if type(failure.error) is type(last.error)]
        is_lost = isinstance(last.error, EngineDeadError | EngineStalledError)
        follows_request = len({failure.replica for failure in alike}) > 1 or len(alike) == self._max_attempts > 1
        if follows_request and not is_lost and all(failure.may_be_outlived for failure in alike):
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

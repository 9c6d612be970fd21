"""Hosts that are lost while the processes of a run start on them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from titan_rl.cluster.hosts.hosts import Hosts
from titan_rl.core.errors import ActorDiedError

T = TypeVar("T")


class StartLosses:
    """What starts on a host that is lost is given up for now, and the run starts without it if the rest is enough."""

    def __init__(self, hosts: Hosts) -> None:
        self._hosts = hosts
        self._reasons: dict[str, str] = {}  # by host

    async def unless_lost(self, host: str, starting: Awaitable[T]) -> T | None:
        """What starts on a host, once it has; None where the host is lost meanwhile.

        Raises:
            ActorDiedError: it does not start, though its host is there.
        """
        try:
            return await starting
        except ActorDiedError as error:
            if host in self._hosts.names:
                raise
            self._reasons.setdefault(host, str(error))
            return None

    def check(self, num_generators: int, least: int, tell: Callable[[str], object]) -> None:
        """
        Args:
            num_generators: that have started.
            least: as `generation.least_generators`.
            tell: shows a person which hosts the run starts without.

        Raises:
            ActorDiedError: these are too few, of which some were to be on hosts that are lost.
        """
        if self._reasons and num_generators < least:
            reasons = "; ".join(self._reasons.values())
            raise ActorDiedError(
                f"{reasons}; of the generators {num_generators} came up, and generation.least_generators is {least}"
            )
        for host, reason in self._reasons.items():
            tell(f"the run starts without host {host}: {reason}")

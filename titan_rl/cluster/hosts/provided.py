"""The hosts that a provider has for a run, now and later."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable

from titan_rl.config.hosts import join_address, split_address
from titan_rl.core.calls.user_code import reason

logger = logging.getLogger(__name__)

ASK_S = 5.0
ANSWER_S = 30.0
MISSES = 3
"""A host is gone once so many answers in a row were without it: DNS, for one, leaves out a name now and then."""


class ProvidedHosts:
    """Asks a provider again and again.

    Args:
        addresses: that the run begins with.
        current: as of `ChangingWorkers`.
        all_leave: as of `ElasticHosts`.
    """

    def __init__(
        self,
        addresses: Iterable[str],
        current: Callable[[], Awaitable[Collection[str]]],
        all_leave: Callable[[], object] | None = None,
    ) -> None:
        self.all_leave = all_leave
        self._addresses = frozenset(addresses)
        self._current = current
        self._missed = Counter[str]()  # answers in a row

    def read(self) -> frozenset[str]:
        """The addresses of those that there are, as far as is known."""
        return self._addresses

    async def watch(self) -> None:
        """Until it is cancelled. What the provider cannot say, or not in time, changes nothing."""
        while True:
            await asyncio.sleep(ASK_S)
            try:
                async with asyncio.timeout(ANSWER_S):
                    self._note({join_address(*split_address(address)) for address in await self._current()})
            except Exception as error:
                logger.warning("the provider does not say which hosts there are: %s", reason(error))

    def _note(self, now: Collection[str]) -> None:
        self._missed = Counter({address: self._missed[address] + 1 for address in self._addresses.difference(now)})
        self._addresses = frozenset(now) | {address for address, missed in self._missed.items() if missed < MISSES}

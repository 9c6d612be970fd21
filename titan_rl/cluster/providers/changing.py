"""Hosts that come and go while a run has them, as a provider tells of them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Protocol, runtime_checkable


@runtime_checkable
class ChangingWorkers(Protocol):
    """What a provider may give in the place of a list of addresses: those that the run begins with, and, whenever it is
    asked, those that there are."""

    def __iter__(self) -> Iterator[str]: ...

    async def current(self) -> Collection[str]:
        """The addresses of all workers that are there now. A run asks every few seconds: a host that comes joins it,
        and one that is missing several times in a row is drained.

        Raises:
            Exception: it is not known now. The run goes on with the hosts that it has, and asks again.
        """
        ...

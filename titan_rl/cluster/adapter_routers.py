"""Routers of several adapters over the same generators."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from titan_rl.cluster.actor_replica import ActorReplica, AdapterReplica
from titan_rl.cluster.generator_processes import GeneratorProcesses
from titan_rl.core.console import LOG, Console
from titan_rl.core.errors import ActorDiedError, EngineDeadError
from titan_rl.generation.router.router import GeneratorRouter
from titan_rl.weights.types import PublishedWeights

ALONE_AFTER = 2
"""Deaths of generators after which replacements work for one suspected adapter at a time."""
JOIN_S, ALONE_S = 1.0, 30.0
"""Time in which such a replacement gets requests of one adapter, and the longest time to finish them, in seconds."""


class AdapterRouters:
    """A router for each adapter, over replicas that all adapters share. Implements `AdaptersRouter`.

    A router balances the requests of its own adapter and tracks the adapter's version.

    If generators die repeatedly, one adapter may be the cause. It is identified if it is the only adapter that had work
    in the generator at each of the deaths. Usually all adapters have work, so after `ALONE_AFTER` deaths a replacement
    first works for one of the suspected adapters at a time.

    Attributes:
        published: Manifests of each adapter's versions.
        by_adapter: Routers that are open, by the name of the adapter.

    Args:
        processes: Generators that have started.
        console: Shows the user the consequences of repeated deaths.
    """

    def __init__(self, processes: GeneratorProcesses, adapters: Iterable[str], console: Console = LOG) -> None:
        self._console = console
        self.published = {name: PublishedWeights() for name in adapters}
        self.by_adapter: dict[str, GeneratorRouter] = {
            name: processes.make_router(
                [AdapterReplica(replica, name, published, self) for replica in processes.replicas]
            )
            for name, published in self.published.items()
        }
        self._num_deaths = 0  # of generators
        self._suspects: frozenset[str] = frozenset()  # adapters that may have caused all deaths
        self._failures: dict[str, asyncio.Future[None]] = {}  # by adapter, for adapters that can be stopped
        self._stopped: set[str] = set()

    def has_replica(self, name: str) -> bool:
        return any(router.has_replica(name) for router in self.by_adapter.values())

    def remove_replica(self, name: str) -> None:
        for router in self._with_replica(name):
            router.remove_replica(name)

    async def retire_replica(self, name: str, finish_s: float) -> None:
        await asyncio.gather(*(router.retire_replica(name, finish_s) for router in self._with_replica(name)))

    async def add_replica(self, replica: ActorReplica) -> bool:
        """Add a replica to all routers. Returns whether it serves all open adapters."""
        if self._num_deaths >= ALONE_AFTER and len(suspects := sorted(self._stoppable(self._suspects))) > 1:
            others = await self._join_all(replica, self.by_adapter.keys() - suspects)
            return await self._work_alone(replica, suspects) and await self._join_all(replica, suspects) and others
        return await self._join_all(replica, self.by_adapter)

    async def _join_all(self, replica: ActorReplica, adapters: Iterable[str]) -> bool:
        open_ones = [each for each in adapters if each in self.by_adapter and each not in self._stopped]
        return all(await asyncio.gather(*(self._join(each, self.by_adapter[each], replica) for each in open_ones)))

    async def _work_alone(self, replica: ActorReplica, suspects: Sequence[str]) -> bool:
        """Have a replica work for one adapter after another. Returns whether it has survived."""
        self._console.warning(
            f"{self._num_deaths} generator deaths may be caused by one of the adapters {', '.join(suspects)}; "
            f"{replica.name} first serves them one at a time"
        )
        for adapter in suspects:
            if not await self._join_all(replica, [adapter]):
                return False
            await asyncio.sleep(JOIN_S)
            router = self.by_adapter.get(adapter)
            if router is not None and router.has_replica(replica.name):
                await router.retire_replica(replica.name, ALONE_S)
            if replica.remote.reason is not None:
                return False
        return True

    def note_death(self, at_work: frozenset[str]) -> None:
        self._suspects = self._suspects & at_work if self._num_deaths else at_work
        self._num_deaths += 1

    def stop_cause(self, why: str) -> str | None:
        if len(self._suspects) != 1 or not (suspects := self._stoppable(self._suspects)):
            return None
        (adapter,) = suspects
        count, self._num_deaths, self._suspects = self._num_deaths, 0, frozenset()
        self._stopped.add(adapter)
        for replica in (router := self.by_adapter[adapter]).replicas:  # a last request would end another generator
            router.remove_replica(replica.name)
        error = ActorDiedError(f"{why}; {count} generators died while they worked for this adapter")
        self._failures.pop(adapter).set_exception(error)
        return adapter

    async def stopped(self, adapter: str) -> None:
        """Wait until an adapter is stopped. An adapter can be stopped only while this waits.

        Raises:
            ActorDiedError: The adapter is stopped, because generators die from its requests.
        """
        failure = self._failures[adapter] = asyncio.get_running_loop().create_future()
        try:
            await failure
        finally:
            self._failures.pop(adapter, None)

    def _stoppable(self, adapters: Iterable[str]) -> list[str]:
        return [each for each in adapters if each in self._failures and each in self.by_adapter]

    async def _join(self, adapter: str, router: GeneratorRouter, replica: ActorReplica) -> bool:
        try:
            return await router.add_replica(AdapterReplica(replica, adapter, self.published[adapter], self))
        except EngineDeadError:
            if self.by_adapter.get(adapter) is router:
                raise
            return True  # the adapter has ended meanwhile, and needs no replica

    def pulled(self, name: str) -> None:
        """Note a pull of one adapter, during which the requests and pulls of the others waited."""
        for router in self.by_adapter.values():
            router.note_pull_elsewhere(name)

    def trouble(self) -> str | None:
        """Reason why the requests of an adapter cannot be answered at present; None while all can."""
        return next((why for router in self.by_adapter.values() if (why := router.trouble()) is not None), None)

    async def close_router(self, adapter: str) -> None:
        """Close the router of an adapter. The generators continue."""
        if (router := self.by_adapter.pop(adapter, None)) is not None:
            await router.close()

    async def close(self) -> None:
        """Close all routers. The generators continue."""
        await asyncio.gather(*(self.close_router(adapter) for adapter in list(self.by_adapter)))

    def _with_replica(self, name: str) -> list[GeneratorRouter]:
        return [router for router in self.by_adapter.values() if router.has_replica(name)]

"""Routers of several adapters over the same generators."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from titan_rl.cluster.actor_replica import ActorReplica, AdapterReplica
from titan_rl.cluster.generator_processes import GeneratorProcesses
from titan_rl.core.errors import EngineDeadError
from titan_rl.generation.router.router import GeneratorRouter
from titan_rl.weights.types import PublishedWeights


class AdapterRouters:
    """A router for each adapter, over replicas that all of them share: the `ReplicaRouter` of the processes.

    A router balances the requests of its own adapter, and has the adapter's version.

    Attributes:
        published: Manifests of each adapter's versions.
        by_adapter: Open routers.

    Args:
        processes: They have started.
    """

    def __init__(self, processes: GeneratorProcesses, adapters: Iterable[str]) -> None:
        self.published = {name: PublishedWeights() for name in adapters}
        self.by_adapter: dict[str, GeneratorRouter] = {
            name: processes.make_router(
                [AdapterReplica(replica, name, published, self) for replica in processes.replicas]
            )
            for name, published in self.published.items()
        }

    def has_replica(self, name: str) -> bool:
        return any(router.has_replica(name) for router in self.by_adapter.values())

    def remove_replica(self, name: str) -> None:
        for router in self._with_replica(name):
            router.remove_replica(name)

    async def retire_replica(self, name: str, finish_s: float) -> None:
        await asyncio.gather(*(router.retire_replica(name, finish_s) for router in self._with_replica(name)))

    async def add_replica(self, replica: ActorReplica) -> bool:
        """Add a replica to all routers. Returns whether it serves all adapters."""
        joining = [self._join(adapter, router, replica) for adapter, router in self.by_adapter.items()]
        return all(await asyncio.gather(*joining))

    async def _join(self, adapter: str, router: GeneratorRouter, replica: ActorReplica) -> bool:
        try:
            return await router.add_replica(AdapterReplica(replica, adapter, self.published[adapter], self))
        except EngineDeadError:
            if self.by_adapter.get(adapter) is router:
                raise
            return True  # the adapter has ended meanwhile, and needs no replica

    def pulled(self, name: str) -> None:
        """Note a pull of one adapter, for which the requests of the others have waited."""
        for router in self.by_adapter.values():
            router.hear_from(name)

    def trouble(self) -> str | None:
        """Reason why the requests of an adapter cannot be answered at present; None while all can."""
        return next((why for router in self.by_adapter.values() if (why := router.trouble()) is not None), None)

    async def close_router(self, adapter: str) -> None:
        """Close the router of an adapter. The generators go on."""
        if (router := self.by_adapter.pop(adapter, None)) is not None:
            await router.close()

    async def close(self) -> None:
        """Close all routers and generators."""
        await asyncio.gather(*(self.close_router(adapter) for adapter in list(self.by_adapter)))

    def _with_replica(self, name: str) -> list[GeneratorRouter]:
        return [router for router in self.by_adapter.values() if router.has_replica(name)]

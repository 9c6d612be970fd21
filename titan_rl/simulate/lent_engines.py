"""Engines on the trainer's devices, which generate while it waits for a batch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

from titan_rl.generation.router import GeneratorRouter
from titan_rl.simulate.simulated_replica import SimulatedReplica

GIVE_BACK_S = 1e3  # at most; it takes a step


class LentEngines:
    """Replicas that a router has at times.

    Each time costs them `wake_s` and a pull at its beginning. At its end the requests that they have are interrupted,
    and go on elsewhere with their tokens. Only what is new comes to them by itself: what runs has to be moved.
    """

    def __init__(self, router: GeneratorRouter, replicas: Sequence[SimulatedReplica], wake_s: float) -> None:
        self._router = router
        self._replicas = replicas
        self._wake_s = wake_s

    @asynccontextmanager
    async def out(self) -> AsyncGenerator[None]:
        """They serve while the block runs, from when they are ready."""
        waking = asyncio.ensure_future(self._wake())
        try:
            yield
        finally:
            waking.cancel()
            await asyncio.wait([waking])
            await self._give_back()

    async def _wake(self) -> None:
        if self._replicas:
            await asyncio.sleep(self._wake_s)
            await asyncio.gather(*(self._router.add_replica(replica) for replica in self._replicas))

    async def _give_back(self) -> None:
        serving = [replica for replica in self._replicas if self._router.has_replica(replica.name)]
        retiring = [
            asyncio.ensure_future(self._router.retire_replica(replica.name, GIVE_BACK_S)) for replica in serving
        ]
        await asyncio.sleep(0)  # nothing comes to them any more
        await self._router.abort([request_id for replica in serving for request_id in replica.request_ids])
        await asyncio.gather(*retiring)

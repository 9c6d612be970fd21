"""Engines on the trainer's devices, which generate while it waits for a batch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

from titan_rl.generation.router import GeneratorRouter
from titan_rl.testing.simulate.simulated_replica import SimulatedReplica

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
        self._lent_s = 0.0  # until they were last given back
        self._lent_since: float | None = None

    @property
    def lent_s(self) -> float:
        """Time of all of them for which they were out until now, that in which they wake included."""
        now = asyncio.get_running_loop().time()
        out_s = 0.0 if self._lent_since is None else now - self._lent_since
        return (self._lent_s + out_s) * len(self._replicas)

    @asynccontextmanager
    async def out(self) -> AsyncGenerator[None]:
        """They serve while the block runs, from when they are ready."""
        began = self._lent_since = asyncio.get_running_loop().time()
        waking = asyncio.ensure_future(self._wake())
        try:
            yield
        finally:
            waking.cancel()
            await asyncio.wait([waking])
            await self._give_back()
            self._lent_s += asyncio.get_running_loop().time() - began
            self._lent_since = None

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

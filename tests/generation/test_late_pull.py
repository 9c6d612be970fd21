"""A pull that the router abandoned arrives after a newer one, at a real engine loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable
from typing import Any

from titan_rl.generation.loop.engine_loop import EngineLoop, LocalReplica
from titan_rl.generation.router import GeneratorRouter, Limits
from titan_rl.generation.scripted_engine import ScriptedEngine
from titan_rl.types import SamplingParams


class RemoteReplica(LocalReplica):
    """Replica whose pulls continue after their caller has been cancelled, as those in another process do."""

    def __init__(self) -> None:
        self.opened, self.released = threading.Event(), threading.Event()
        self.pulls: list[asyncio.Task[int]] = []
        super().__init__("a", EngineLoop(ScriptedEngine), self._items)

    def _items(self, version: int) -> Iterable[tuple[str, Any]]:
        if version == 6 and not self.opened.is_set():
            self.opened.set()
            assert self.released.wait(30)
        return [("weight", version)]

    async def pull(self, version: int) -> int:
        task = asyncio.ensure_future(super().pull(version))
        self.pulls.append(task)
        return await asyncio.shield(task)


async def test_late_pull_loads_nothing_and_router_reports_the_served_version() -> None:
    replica = RemoteReplica()
    await replica.loop.start()
    router = GeneratorRouter([replica], limits=Limits(pull_s=0.1, quarantine_s=0.01))
    abandoned = asyncio.ensure_future(router.pull_state_dict(6))
    assert await asyncio.to_thread(replica.opened.wait, 30)
    await router.pull_state_dict(7)
    await abandoned
    replica.released.set()
    assert await replica.pulls[0] == 7  # the late one
    completion = await router.generate([1], request_id="r", sampling=SamplingParams(max_tokens=3))
    assert completion.versions == [7, 7, 7]
    assert [(replica.version, replica.serving) for replica in router.replicas] == [(7, True)]
    await router.close()

"""Server of a policy with scripted engines behind a router."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from background import HANG_S

from titan_rl.generation.loop.engine_loop import EngineLoop, LocalReplica
from titan_rl.generation.router import GeneratorRouter
from titan_rl.generation.scripted_engine import ScriptedEngine
from titan_rl.serving.app import PolicyApp, make_app
from titan_rl.serving.http.exchange import ServerLimits

CONTEXT = 512


class Engines:
    """Scripted engines that a test can hold between two steps."""

    def __init__(self, count: int = 2, **settings: Any) -> None:
        self.engines: list[ScriptedEngine] = []
        self.settings = {"max_context": CONTEXT, **settings}
        self.loops = [EngineLoop(self._make, stream_interval=1) for _ in range(count)]

    def _make(self) -> ScriptedEngine:
        engine = ScriptedEngine(**self.settings)
        self.engines.append(engine)
        return engine

    @asynccontextmanager
    async def router(self) -> AsyncIterator[GeneratorRouter]:
        for loop in self.loops:
            await loop.start()
        router = GeneratorRouter(
            [LocalReplica(f"engine-{index}", loop, lambda version: []) for index, loop in enumerate(self.loops)]
        )
        try:
            yield router
        finally:
            for engine in self.engines:
                engine.release.set()
            await router.close()


def client_of(app: PolicyApp, **headers: str) -> httpx.AsyncClient:
    """Make a client that calls the application directly, without a network."""
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://policy", headers=headers, timeout=30.0
    )


async def until(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds, while the event loop and the engines run."""
    async with asyncio.timeout(HANG_S):
        while not condition():  # noqa: ASYNC110 engines run in threads and set no event
            await asyncio.sleep(0.001)


@dataclass
class Served:
    router: GeneratorRouter
    app: PolicyApp
    engines: Engines


@asynccontextmanager
async def served(*, engine: dict[str, Any] | None = None, count: int = 2, **app: Any) -> AsyncIterator[Served]:
    engines = Engines(count, **(engine or {}))
    async with engines.router() as router:
        settings: dict[str, Any] = {
            "model": "policy",
            "max_context": CONTEXT,
            "wait_until_resumed": router.wait_resumed,
            "limits": ServerLimits(request_s=30.0, body_s=5.0),
            **app,
        }
        yield Served(router, make_app(router.stream, **settings), engines)

"""An engine loop of this process as a replica of a router."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from titan_rl.generation.loop.engine_loop import EngineLoop
from titan_rl.generation.request import EngineRequest, OnChunk
from titan_rl.generation.types import GaugeSummary, PauseMode
from titan_rl.types import Completion, SamplingParams


class LocalReplica:
    """The `StreamingReplica` of an engine loop, for tests, simulations, and whatever needs no second process.

    Example:

        replica = LocalReplica("engine-0", EngineLoop(ScriptedEngine), lambda version: [])
        await replica.loop.start()
        router = GeneratorRouter([replica])

    Args:
        items_of: (name, tensor) pairs of a published version.
    """

    def __init__(self, name: str, loop: EngineLoop, items_of: Callable[[int], Iterable[tuple[str, Any]]]) -> None:
        self.name = name
        self.loop = loop
        self._items_of = items_of
        self.gauges: GaugeSummary | None = None

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        *,
        request_id: str,
        session_id: str | None = None,
        sampling: SamplingParams,
    ) -> Completion:
        return await self.loop.generate(
            prompt_token_ids, request_id=request_id, session_id=session_id, sampling=sampling
        )

    async def stream(self, request: EngineRequest, on_chunk: OnChunk) -> Completion:
        return await self.loop.stream(request, on_chunk)

    async def pull(self, version: int) -> int:
        result = await self.loop.pull(version, lambda: self._items_of(version))
        self.gauges = result.gauges or self.gauges
        return result.version

    async def pause(self, mode: PauseMode) -> None:
        await self.loop.set_paused(mode)

    async def resume(self) -> None:
        await self.loop.set_paused(None)

    async def abort(self, request_ids: Sequence[str]) -> None:
        await self.loop.abort(request_ids)

    async def close(self) -> None:
        await self.loop.close()

"""Suspension of a group: the guard between its rollouts and the generator."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from titan_rl.core.errors import RequestError
from titan_rl.scheduling.lease import Suspension
from titan_rl.types import Completion, FinishReason, SamplingParams

SAMPLING = SamplingParams(max_tokens=4)


class Engine:
    """Engine whose requests end when they are aborted; request ids are unique."""

    def __init__(self) -> None:
        self.running: dict[str, asyncio.Future[FinishReason]] = {}
        self.aborted: list[str] = []

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        *,
        request_id: str,
        session_id: str | None = None,
        sampling: SamplingParams,
    ) -> Completion:
        if request_id in self.running:
            raise RequestError(f"{request_id} is in flight")
        future = self.running[request_id] = asyncio.get_running_loop().create_future()
        return Completion(request_id, [], [], await future, ())

    async def abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self.aborted.append(request_id)
            self.running[request_id].set_result(FinishReason.ABORT)


@pytest.mark.looptime
async def test_duplicate_request_id_fails_without_affecting_the_first() -> None:
    engine, suspension = Engine(), Suspension()
    generate = suspension.guard(engine.generate, engine.abort)
    first = asyncio.create_task(generate([1], request_id="a", sampling=SAMPLING))
    await asyncio.sleep(0)
    with pytest.raises(RequestError, match="a is in flight"):
        await generate([1], request_id="a", sampling=SAMPLING)
    suspension.suspend()
    await suspension.abort_in_flight()
    async with asyncio.timeout(10):
        assert (await first).finish_reason is FinishReason.ABORT
    assert engine.aborted == ["a"]


async def test_request_during_a_suspension_returns_aborted() -> None:
    engine, suspension = Engine(), Suspension()
    suspension.suspend()
    completion = await suspension.guard(engine.generate, engine.abort)([1], request_id="a", sampling=SAMPLING)
    assert (completion.finish_reason, engine.running) == (FinishReason.ABORT, {})
    await suspension.abort_in_flight()
    assert engine.aborted == []

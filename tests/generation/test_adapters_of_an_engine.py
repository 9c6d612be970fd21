"""Engine loop whose engine holds several adapters, each with its own versions."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from titan_rl.core.errors import GenerationError, StateDictError
from titan_rl.generation.engine import LoadedPolicy
from titan_rl.generation.loop.engine_loop import EngineLoop
from titan_rl.generation.request import EngineRequest
from titan_rl.generation.scripted_engine import ScriptedEngine, scripted_logprobs
from titan_rl.types import Completion, SamplingParams


class Stage:
    """Engine loop over a scripted engine that blocks before its tenth step."""

    def __init__(self) -> None:
        self.engine = ScriptedEngine(block_at_step=10)
        self.loop = EngineLoop(lambda: self.engine)

    async def ask(self, *adapters: str) -> list[asyncio.Task[Completion]]:
        """Start a request for each adapter, and wait until the engine blocks."""
        await self.loop.start()
        requests = [EngineRequest(name, [1, 2, 3], SamplingParams(max_tokens=20), adapter=name) for name in adapters]
        asked = [asyncio.create_task(self.loop.stream(request)) for request in requests]
        await asyncio.to_thread(self.engine.started.wait, 30)
        return asked

    async def pull(self, version: int, adapter: str, fails: bool = False) -> None:
        def check(policy: LoadedPolicy) -> None:
            assert policy.score([[1, 2, 3]]) == [scripted_logprobs([1, 2, 3], version)]
            if fails:
                raise StateDictError("a layer is missing")

        pulling = asyncio.create_task(self.loop.pull(version, items, check, adapter=adapter))
        await asyncio.sleep(0.05)  # the pull is opened in another thread
        self.engine.release.set()
        await pulling


def items() -> Iterator[tuple[str, float]]:
    yield "lora_A", 1.0


def spans(completion: Completion) -> list[tuple[int, int]]:
    return [(span.version, span.num_tokens) for span in completion.version_spans]


async def test_pull_changes_only_the_tokens_of_its_adapter() -> None:
    stage = Stage()
    asked = await stage.ask("sort", "sum", "")
    await stage.pull(1, "sort")
    sort, other, plain = await asyncio.gather(*asked)
    assert [version for version, _ in spans(sort)] == [0, 1]
    assert spans(other) == spans(plain) == [(0, 20)]
    tokens = [1, 2, 3, *sort.token_ids]
    assert sort.logprobs[-1] == pytest.approx(scripted_logprobs(tokens, 1)[-1])
    assert other.logprobs[-1] == pytest.approx(scripted_logprobs([1, 2, 3, *other.token_ids], 0)[-1])
    assert (stage.loop.version_of("sort"), stage.loop.version_of("sum"), stage.loop.version) == (1, 0, 0)
    await stage.loop.close()


async def test_failed_verification_fails_only_requests_of_that_adapter() -> None:
    stage = Stage()
    sort, other = await stage.ask("sort", "sum")
    with pytest.raises(StateDictError, match="a layer is missing"):
        await stage.pull(1, "sort", fails=True)
    with pytest.raises(GenerationError, match="the loaded weights are unknown"):
        await sort
    assert spans(await other) == [(0, 20)]
    again = EngineRequest("again", [1], SamplingParams(max_tokens=1), adapter="sort")
    with pytest.raises(GenerationError, match="the loaded weights are unknown"):
        await stage.loop.stream(again)
    await stage.pull(2, "sort")
    assert spans(await stage.loop.stream(again)) == [(2, 1)]
    await stage.loop.close()


async def test_pending_pulls_of_two_adapters_are_both_loaded() -> None:
    stage = Stage()
    asked = await stage.ask("sort", "sum")
    pulls = [
        asyncio.create_task(stage.loop.pull(version, items, adapter=adapter))
        for version, adapter in ((1, "sort"), (7, "sum"), (2, "sort"))
    ]
    await asyncio.sleep(0.05)  # the pulls are opened in another thread
    stage.engine.release.set()
    assert [result.version for result in await asyncio.gather(*pulls)] == [2, 7, 2]
    assert stage.engine.policy("sort").versions == [0, 2]
    assert stage.engine.policy("sum").versions == [0, 7]
    await asyncio.gather(*asked)
    await stage.loop.close()

"""Listening to the tokens of a call, which arrive before its completion, in order and once each."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from titan_rl import (
    Completion,
    EngineLoop,
    EngineRequest,
    FinishReason,
    GeneratorRouter,
    SamplingParams,
    ScriptedEngine,
    VersionSpan,
    resume_on_abort,
)
from titan_rl.core.calls.bounded import bounded
from titan_rl.core.errors import GenerationError
from titan_rl.generation.continuation import Resume, listening
from titan_rl.generation.loop.engine_loop import LocalReplica
from titan_rl.types import TokenChunk

SAMPLING = SamplingParams(max_tokens=12)


def tokens_of(chunks: Sequence[TokenChunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]


async def test_listener_receives_only_its_call_even_across_an_abort() -> None:
    engine = ScriptedEngine(block_at_step=5)
    loop = EngineLoop(lambda: engine, stream_interval=1)
    await loop.start()
    router = GeneratorRouter([LocalReplica("a", loop, lambda _: [])])
    generate, heard = resume_on_abort(router.generate, wait_until_resumed=router.wait_resumed), list[TokenChunk]()

    async def ask(name: str) -> Completion:
        # in its own task, like the requests of a timed rollout
        return await bounded(generate([1, 2], request_id=name, sampling=SAMPLING), 30.0, name)

    async def listened() -> Completion:
        with listening(heard.append):
            return await ask("a")

    asked, other = asyncio.ensure_future(listened()), asyncio.ensure_future(ask("b"))
    assert await asyncio.to_thread(engine.started.wait, 10)
    assert tokens_of(heard)  # before any completion
    pausing = asyncio.ensure_future(router.pause("keep"))
    while loop.paused is None:  # noqa: ASYNC110 engine threads set no event
        await asyncio.sleep(0)
    engine.release.set()
    await pausing
    await loop.abort()
    await router.resume()
    completion = await asked
    assert completion.metrics["num_resumes"] == 1
    assert {chunk.request_id.partition("~")[0] for chunk in heard} == {"a"}
    assert tokens_of(heard) == list(completion.token_ids) == list((await other).token_ids)
    await router.close()


def completion(tokens: list[int], reason: FinishReason = FinishReason.STOP) -> Completion:
    return Completion("r", tokens, [-0.5] * len(tokens), reason, (VersionSpan(0, len(tokens)),))


async def test_listener_receives_non_streaming_completions_part_by_part() -> None:
    parts = [completion([5, 6], FinishReason.ABORT), completion([7])]
    heard: list[list[int]] = []

    async def generate(
        prompt_token_ids: Any, *, request_id: str, session_id: str | None = None, sampling: Any
    ) -> Completion:
        return parts.pop(0)

    with listening(lambda chunk: heard.append(list(chunk.token_ids))):
        await resume_on_abort(generate)([1], request_id="r", sampling=SAMPLING)
    assert heard == [[5, 6], [7]]


async def test_completion_must_match_its_stream_and_late_chunks_are_dropped() -> None:
    late: list[Any] = []
    heard: list[TokenChunk] = []

    async def ask(request: EngineRequest, on_chunk: Any) -> Completion:
        late.append(on_chunk)
        on_chunk(TokenChunk("r", [5], [-0.5], (VersionSpan(0, 1),)))
        return completion([5, 6] if len(late) == 1 else [9, 6])

    resume, request = Resume(), EngineRequest("r", [1], SAMPLING)
    await resume.complete(ask, request, heard.append)
    late[0](TokenChunk("r", [7], [-0.5], (VersionSpan(0, 1),)))
    assert tokens_of(heard) == [5, 6]
    with pytest.raises(GenerationError, match="differs from the tokens streamed before"):
        await resume.complete(ask, request, heard.append)

"""Top logprobs: requests that ask receive them, and they are those of the weights that sampled each token."""

from __future__ import annotations

import asyncio

import pytest

from titan_rl import EngineLoop, GeneratorRouter, SamplingParams, ScriptedEngine, VersionSpan
from titan_rl.core.errors import GenerationError
from titan_rl.generation.engine import TokenDelta
from titan_rl.generation.loop.engine_loop import LocalReplica
from titan_rl.generation.request import EngineRequest
from titan_rl.generation.scripted_engine import scripted_logprobs
from titan_rl.serving.policy import uninterrupted
from titan_rl.types import Completion, TokenChunk

VOCAB = 32
PROMPT = [1, 2]
ASKING = SamplingParams(max_tokens=12, top_logprobs=3)


def expected(completion: Completion) -> list[list[tuple[int, float]]]:
    """Top logprobs at each position, by the weights of the token's version."""
    context, rows = list(PROMPT), []
    for token, version in zip(completion.token_ids, completion.versions, strict=True):
        scored = [(scripted_logprobs([*context, other], version)[-1], other) for other in range(VOCAB)]
        rows.append([(other, logprob) for logprob, other in sorted(scored, reverse=True)[:3]])
        context.append(token)
    return rows


async def test_top_logprobs_are_returned_only_to_requests_that_ask() -> None:
    loop = EngineLoop(lambda: ScriptedEngine(vocab_size=VOCAB))
    await loop.start()
    asking, other = await asyncio.gather(
        loop.generate(PROMPT, request_id="a", sampling=ASKING),
        loop.generate(PROMPT, request_id="b", sampling=SamplingParams(max_tokens=12)),
    )
    await loop.close()
    assert asking.top_logprobs == expected(asking)
    assert (other.top_logprobs, other.token_ids, other.logprobs) == (None, asking.token_ids, asking.logprobs)


class Blocked(ScriptedEngine):
    """Engine that blocks in its fourth step, and optionally fails in the next."""

    def __init__(self, *, fails: bool = False) -> None:
        super().__init__(vocab_size=VOCAB, block_at_step=4, fail_at_step=5 if fails else None)


async def test_top_logprobs_survive_failover_pause_abort_and_pull() -> None:
    """All of this happens to one stream, whose chunks join to the completion."""
    engines: list[ScriptedEngine] = []

    def make() -> ScriptedEngine:
        engines.append(Blocked(fails=not engines))
        return engines[-1]

    loops = [EngineLoop(make, stream_interval=1) for _ in range(2)]
    for loop in loops:
        await loop.start()
    router = GeneratorRouter([LocalReplica(f"e{at}", loop, lambda _: []) for at, loop in enumerate(loops)])
    stream, received = uninterrupted(router.stream, wait_until_resumed=router.wait_resumed), list[TokenChunk]()
    asked = asyncio.ensure_future(stream(EngineRequest("a", PROMPT, ASKING), received.append))
    for engine in [engines[0], engines[1]]:
        assert await asyncio.to_thread(engine.started.wait, 10)
        if engine is engines[1]:
            pausing = asyncio.ensure_future(router.pause("keep"))
            while loops[1].paused is None:  # noqa: ASYNC110 engine threads set no event
                await asyncio.sleep(0)
            engine.release.set()
            await pausing
            await loops[1].abort()
            await router.pull_state_dict(1)
            await router.resume()
        engine.release.set()
    completion = await asked
    await router.close()
    assert set(completion.versions) == {0, 1}
    assert completion.top_logprobs == expected(completion)
    assert [row for chunk in received for row in chunk.top_logprobs or ()] == completion.top_logprobs


class Forgetful(ScriptedEngine):
    """Engine that returns no top logprobs."""

    def step(self) -> list[TokenDelta]:
        return [TokenDelta(d.request_id, d.token_ids, d.logprobs, d.finish_reason) for d in super().step()]


async def test_token_without_top_logprobs_fails_only_its_request() -> None:
    loop = EngineLoop(lambda: Forgetful(vocab_size=VOCAB))
    await loop.start()
    with pytest.raises(GenerationError, match="'a' asked for top logprobs"):
        await loop.generate(PROMPT, request_id="a", sampling=ASKING)
    await loop.generate(PROMPT, request_id="b", sampling=SamplingParams(max_tokens=2))
    await loop.close()


@pytest.mark.parametrize("number", [-1, 21])
def test_top_logprobs_out_of_range_is_rejected(number: int) -> None:
    with pytest.raises(ValueError, match=f"top_logprobs is {number}; it must be from 0 to 20"):
        SamplingParams(max_tokens=1, top_logprobs=number)


def test_chunk_rejects_missing_rows_of_top_logprobs() -> None:
    with pytest.raises(ValueError, match="2 token_ids and 1 rows in top_logprobs"):
        TokenChunk("a", [1, 2], [-1.0, -1.0], (VersionSpan(0, 2),), top_logprobs=[[(1, -0.5)]])

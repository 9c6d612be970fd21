"""A prompt that is not all token ids fails alone, whatever engine is behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from titan_rl.errors import RequestError
from titan_rl.generation.function_replica import FunctionReplica
from titan_rl.generation.loop.engine_loop import EngineLoop
from titan_rl.generation.loop.local_replica import LocalReplica
from titan_rl.generation.router import ConsistentHash, GeneratorRouter, GroupAffinity, RoundRobin, StickySession
from titan_rl.generation.scripted_engine import ScriptedEngine
from titan_rl.testing.engine_contract import NO_PROMPTS
from titan_rl.types import Completion, FinishReason, SamplingParams, VersionSpan

SAMPLING = SamplingParams(max_tokens=4)


@pytest.mark.parametrize("name", NO_PROMPTS)
async def test_an_engine_loop_refuses_it_and_goes_on(name: str) -> None:
    loop = EngineLoop(ScriptedEngine)
    await loop.start()
    with pytest.raises(RequestError, match=r"'bad' .*token"):
        await loop.generate(NO_PROMPTS[name], request_id="bad", sampling=SAMPLING)
    assert len((await loop.generate([1, 2], request_id="good", sampling=SAMPLING)).token_ids) == 4
    await loop.close()


@pytest.mark.parametrize("name", NO_PROMPTS)
async def test_a_router_refuses_it_and_takes_no_replica_out_of_service(name: str) -> None:
    asked: list[str] = []

    async def generate(prompt_token_ids: Sequence[int], *, request_id: str, **_: Any) -> Completion:
        asked.append(request_id)
        total = sum(prompt_token_ids)  # of an engine that computes with what it is given
        return Completion(request_id, [total], [0.0], FinishReason.LENGTH, (VersionSpan(0, 1),))

    loop = EngineLoop(ScriptedEngine)
    await loop.start()
    router = GeneratorRouter([FunctionReplica(generate), LocalReplica("scripted", loop, _no_weights)])
    with pytest.raises(RequestError, match=r"'bad' .*token"):
        await router.generate(NO_PROMPTS[name], request_id="bad", sampling=SAMPLING)
    assert all(replica.serving for replica in router.replicas)
    assert not asked
    for request_id in "ab":
        await router.generate([1, 2], request_id=request_id, sampling=SAMPLING)
    await router.close()


@pytest.mark.parametrize("ids", [{"session_id": "half \ud83d"}, {"session_id": 7}, {"request_id": "half \ud83d"}])
async def test_an_id_that_is_no_text_is_refused_by_every_strategy(ids: dict[str, Any]) -> None:
    loop = EngineLoop(ScriptedEngine)
    await loop.start()
    for strategy in (ConsistentHash(), StickySession(GroupAffinity()), RoundRobin()):
        router = GeneratorRouter([LocalReplica("scripted", loop, _no_weights)], strategy)
        with pytest.raises(RequestError, match=f"{next(iter(ids))} is .*; it must be text that UTF-8 can encode"):
            await router.generate([1], **{"request_id": "r", "sampling": SAMPLING, **ids})
        assert all(replica.serving for replica in router.replicas)
        await router.generate([1], request_id="good", session_id="gr\u00fcn \U0001f600", sampling=SAMPLING)
    await loop.close()


async def test_numpy_integers_are_token_ids() -> None:
    numpy = pytest.importorskip("numpy")
    loop = EngineLoop(ScriptedEngine)
    await loop.start()
    plain = await loop.generate([1, 2, 3], request_id="list", sampling=SAMPLING)
    for name, prompt in {"array": numpy.array([1, 2, 3]), "list of": [numpy.int64(1), 2, numpy.int32(3)]}.items():
        completion = await loop.generate(prompt, request_id=name, sampling=SAMPLING)
        assert completion.token_ids == plain.token_ids
    await loop.close()


def _no_weights(version: int) -> Any:
    raise NotImplementedError

"""Requests with an invalid prompt, id or sampling fail alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from titan_rl.core.errors import RequestError
from titan_rl.generation.function_replica import FunctionReplica
from titan_rl.generation.loop.engine_loop import EngineLoop, LocalReplica
from titan_rl.generation.router import ConsistentHash, GeneratorRouter, GroupAffinity, RoundRobin, StickySession
from titan_rl.generation.scripted_engine import ScriptedEngine
from titan_rl.testing.engine_contract import NO_PROMPTS
from titan_rl.types import Completion, FinishReason, SamplingParams, VersionSpan

SAMPLING = SamplingParams(max_tokens=4)


@pytest.mark.parametrize("name", NO_PROMPTS)
async def test_engine_loop_rejects_an_invalid_prompt_and_keeps_serving(name: str) -> None:
    loop = EngineLoop(ScriptedEngine)
    await loop.start()
    with pytest.raises(RequestError, match=r"'bad' .*token"):
        await loop.generate(NO_PROMPTS[name], request_id="bad", sampling=SAMPLING)
    assert len((await loop.generate([1, 2], request_id="good", sampling=SAMPLING)).token_ids) == 4
    await loop.close()


@pytest.mark.parametrize("name", NO_PROMPTS)
async def test_router_rejects_an_invalid_prompt_without_blaming_a_replica(name: str) -> None:
    asked: list[str] = []

    async def generate(prompt_token_ids: Sequence[int], *, request_id: str, **_: Any) -> Completion:
        asked.append(request_id)
        total = sum(prompt_token_ids)  # like an engine that computes with its input
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


INVALID_IDS = [{"session_id": "half \ud83d"}, {"session_id": 7}, {"request_id": "half \ud83d"}, {"request_id": None}]


@pytest.mark.parametrize("ids", INVALID_IDS)
async def test_non_text_ids_are_rejected_under_every_strategy(ids: dict[str, Any]) -> None:
    loop = EngineLoop(ScriptedEngine)
    await loop.start()
    for strategy in (ConsistentHash(), StickySession(GroupAffinity()), RoundRobin()):
        router = GeneratorRouter([LocalReplica("scripted", loop, _no_weights)], strategy)
        with pytest.raises(RequestError, match=f"{next(iter(ids))} is .*; it must be text that UTF-8 can encode"):
            await router.generate([1], **{"request_id": "r", "sampling": SAMPLING, **ids})
        assert all(replica.serving for replica in router.replicas)
        await router.generate([1], request_id="good", session_id="gr\u00fcn \U0001f600", sampling=SAMPLING)
    await loop.close()


async def test_numpy_integers_are_accepted_as_token_ids() -> None:
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


@pytest.mark.parametrize("sampling", [None, {"max_tokens": 4}])
async def test_invalid_sampling_is_rejected(sampling: Any) -> None:
    loop = EngineLoop(ScriptedEngine)
    await loop.start()
    router = GeneratorRouter([LocalReplica("scripted", loop, _no_weights)])
    with pytest.raises(RequestError, match=r"sampling of request 'r' is .*; it must be a SamplingParams"):
        await router.generate([1], request_id="r", sampling=sampling)
    await router.close()


async def returns_a_list(prompt_token_ids: Sequence[int], **_: Any) -> Any:
    return [1, 2]


def is_sync(prompt_token_ids: Sequence[int], **_: Any) -> Any:
    return Completion("r", [1], [0.0], FinishReason.LENGTH, (VersionSpan(0, 1),))


@pytest.mark.parametrize(
    ("generate", "message"),
    [
        (returns_a_list, "returns_a_list returned a list; a Completion is expected"),
        (is_sync, "is_sync returned a Completion that cannot be awaited; write async def"),
    ],
)
async def test_generate_fn_with_a_wrong_result_is_named_with_its_line(generate: Any, message: str) -> None:
    replica = FunctionReplica(generate)
    with pytest.raises(TypeError, match=rf"generate of .*test_prompts.py:\d+ in {message}"):
        await replica.generate([1], request_id="r", sampling=SAMPLING)

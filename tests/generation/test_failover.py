"""Failover: a replica is lost during a request, which continues on another one from the tokens the router has seen.

The replicas are engine loops over `ScriptedEngine`, whose next token is a function of the tokens before it, so a lost,
doubled or misplaced token changes everything that follows.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
from depth import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from titan_rl.core.errors import GenerationError, RequestError, StateDictError
from titan_rl.generation.loop.engine_loop import EngineLoop
from titan_rl.generation.request import EngineRequest
from titan_rl.generation.router import GeneratorRouter, Limits
from titan_rl.generation.scripted_engine import ScriptedEngine
from titan_rl.types import Completion, FinishReason, SamplingParams, TokenChunk, VersionSpan

INTERVAL = 4


class LoopReplica:
    """Engine loop as a replica, which dies once a request has streamed `die_at` tokens."""

    def __init__(self, name: str, die_at: int | None = None) -> None:
        self.name = name
        self.loop = EngineLoop(ScriptedEngine, stream_interval=INTERVAL)
        self.asked: list[tuple[int, int]] = []  # (prompt tokens, budget) of each request
        self._die_at = die_at
        self._dead: asyncio.Event = asyncio.Event()

    async def stream(self, request, on_chunk) -> Completion:
        self.asked.append((len(request.prompt_token_ids), request.sampling.max_tokens))
        streamed = 0

        def forward(chunk: TokenChunk) -> None:
            nonlocal streamed
            if self._dead.is_set():
                return
            on_chunk(chunk)
            streamed += len(chunk.token_ids)
            if self._die_at is not None and streamed >= self._die_at:
                self._dead.set()

        answer = asyncio.ensure_future(self.loop.stream(request, forward))
        death = asyncio.ensure_future(self._dead.wait())
        await asyncio.wait([answer, death], return_when=asyncio.FIRST_COMPLETED)
        if self._dead.is_set():
            answer.cancel()
            raise GenerationError(f"{self.name} died")
        death.cancel()
        return answer.result()

    async def generate(self, prompt_token_ids, *, request_id, session_id=None, sampling) -> Completion:
        raise AssertionError("a replica that streams is asked to stream")

    async def pull(self, version: int) -> None:
        if self._dead.is_set():
            raise GenerationError(f"{self.name} is dead")

    async def pause(self, mode: str) -> None: ...

    async def resume(self) -> None: ...

    async def abort(self, request_ids: Sequence[str]) -> None:
        await self.loop.abort(request_ids)

    async def close(self) -> None: ...


@asynccontextmanager
async def routed(*replicas: LoopReplica) -> AsyncIterator[GeneratorRouter]:
    for replica in replicas:
        await replica.loop.start()
    router = GeneratorRouter(replicas, max_attempts=len(replicas), limits=Limits(no_replica_s=1.0))
    try:
        yield router
    finally:
        await router.close()
        for replica in replicas:
            await replica.loop.close()


async def undisturbed(prompt: list[int], sampling: SamplingParams) -> Completion:
    loop = EngineLoop(ScriptedEngine)
    await loop.start()
    try:
        return await loop.generate(prompt, request_id="r", sampling=sampling)
    finally:
        await loop.close()


@settings(max_examples=examples(25), deadline=None)
@given(die_at=st.lists(st.integers(1, 40), min_size=1, max_size=3), budget=st.integers(1, 48))
def test_failover_tokens_equal_those_of_an_undisturbed_run(die_at: list[int], budget: int) -> None:
    async def scenario() -> None:
        sampling = SamplingParams(max_tokens=budget)
        whole = await undisturbed([3, 1, 4], sampling)
        replicas = [LoopReplica(f"mortal-{index}", tokens) for index, tokens in enumerate(die_at)]
        received: list[int] = []
        async with routed(*replicas, LoopReplica("survivor")) as router:
            request = EngineRequest("r", [3, 1, 4], sampling)
            completion = await router.stream(request, lambda chunk: received.extend(chunk.token_ids))
            assert all(replica.load == 0 for replica in router.replicas)
        assert received == list(completion.token_ids[: len(received)])
        assert len(received) >= budget - INTERVAL
        assert list(completion.token_ids) == list(whole.token_ids)
        assert list(completion.logprobs) == list(whole.logprobs)
        assert completion.finish_reason is whole.finish_reason
        assert completion.request_id == "r"

    asyncio.run(scenario())


async def test_failover_regenerates_only_unstreamed_tokens() -> None:
    first, second = LoopReplica("first", die_at=10), LoopReplica("second")
    async with routed(first, second) as router:
        completion = await router.generate([7] * 5, request_id="r", sampling=SamplingParams(max_tokens=30))
    assert first.asked == [(5, 30)]
    assert second.asked == [(5 + 12, 30 - 12)]  # chunks arrived at 4, 8 and 12 tokens
    assert len(completion.token_ids) == 30
    assert completion.metrics["num_resumes"] == 1


async def test_failover_sends_no_request_when_all_tokens_were_streamed() -> None:
    first, second = LoopReplica("first", die_at=8), LoopReplica("second")
    async with routed(first, second) as router:
        completion = await router.generate([7], request_id="r", sampling=SamplingParams(max_tokens=8))
    assert second.asked == []
    assert (len(completion.token_ids), completion.finish_reason) == (8, FinishReason.LENGTH)


async def test_loss_of_the_last_replica_fails_the_request_with_the_reason() -> None:
    async with routed(LoopReplica("only", die_at=4)) as router:
        with pytest.raises(GenerationError, match="only died"):
            await router.generate([7], request_id="r", sampling=SamplingParams(max_tokens=64))


async def test_replica_cannot_modify_the_prompt_of_caller_or_next_replica() -> None:
    seen: list[list[int]] = []

    class Meddling:
        def __init__(self, name: str) -> None:
            self.name = name

        async def generate(self, prompt_token_ids, *, request_id, session_id=None, sampling) -> Completion:
            seen.append(list(prompt_token_ids))
            prompt_token_ids.append(99)
            if len(seen) == 1:
                raise GenerationError("gone")
            return Completion(request_id, [], [], FinishReason.STOP, ())

        async def pull(self, version: int) -> int:
            return version

        async def pause(self, mode) -> None: ...
        async def resume(self) -> None: ...
        async def abort(self, request_ids) -> None: ...
        async def close(self) -> None: ...

    router = GeneratorRouter([Meddling("a"), Meddling("b")])
    mine = [5]
    await router.generate(mine, request_id="r", sampling=SamplingParams(max_tokens=8))
    await router.close()
    assert (mine, seen) == ([5], [[5], [5]])


class LateAborts:
    """Replica that receives aborts late, and rejects the id of a running request."""

    name = "late-aborts"

    def __init__(self, rejects_aborts: bool) -> None:
        self.rejects_aborts = rejects_aborts
        self.abort_arrives = asyncio.Event()
        self.running: set[str] = set()
        self.answer = asyncio.Event()
        self.asked = asyncio.Event()

    async def generate(self, prompt_token_ids, *, request_id, session_id=None, sampling) -> Completion:
        if request_id in self.running:
            raise RequestError(f"{request_id!r} is in flight")
        self.running.add(request_id)
        self.asked.set()
        await self.answer.wait()
        self.running.discard(request_id)
        return Completion(request_id, [7], [0.0], FinishReason.STOP, [VersionSpan(0, 1)])

    async def abort(self, request_ids: Sequence[str]) -> None:
        if self.rejects_aborts:
            raise GenerationError("not accepted")
        await self.abort_arrives.wait()
        self.running.difference_update(request_ids)

    async def pull(self, version: int) -> None: ...
    async def pause(self, mode: object) -> None: ...
    async def resume(self) -> None: ...
    async def close(self) -> None: ...


@pytest.mark.parametrize("rejects_aborts", [False, True])
async def test_request_repeated_before_its_abort_arrives_is_not_a_duplicate(rejects_aborts: bool) -> None:
    replica = LateAborts(rejects_aborts)
    router = GeneratorRouter([replica])

    async def ask() -> Completion:
        return await router.generate([1], request_id="g/0/0", sampling=SamplingParams(max_tokens=4))

    for _ in range(3):
        replica.asked.clear()
        first = asyncio.create_task(ask())
        await replica.asked.wait()
        first.cancel()
        await asyncio.wait([first])
        for _ in range(20):  # the abort has been rejected by then
            await asyncio.sleep(0)
    replica.answer.set()
    whole = await ask()
    assert (whole.request_id, list(whole.token_ids)) == ("g/0/0", [7])
    replica.abort_arrives.set()
    await router.close()


class SecondPullFails(LateAborts):
    def __init__(self, name: str) -> None:
        super().__init__(rejects_aborts=True)
        self.name = name
        self.abort_arrives.set()
        self.engine_ids: list[str] = []
        self.pulls = 0

    async def generate(self, prompt_token_ids, *, request_id, session_id=None, sampling) -> Completion:
        self.engine_ids.append(request_id)
        return await super().generate(prompt_token_ids, request_id=request_id, sampling=sampling)

    async def pull(self, version: int) -> None:
        self.pulls += 1
        if self.pulls == 2:
            raise StateDictError("once")


@pytest.mark.looptime
@pytest.mark.parametrize("remedy", ["recovers", "accepts the next abort", "is removed"])
async def test_request_id_is_not_reused_until_its_abort_is_confirmed(remedy: str) -> None:
    replica = SecondPullFails("first")
    router = GeneratorRouter([replica])
    await router.pull_state_dict(1)

    async def cancel_request(request_id: str) -> None:
        asking = asyncio.create_task(router.generate([1], request_id=request_id, sampling=SamplingParams(max_tokens=4)))
        await asyncio.sleep(10.0)
        asking.cancel()
        await asyncio.wait([asking])
        await asyncio.sleep(1.0)

    await cancel_request("r")
    await cancel_request("r")
    assert replica.engine_ids == ["r", "r~1"]
    replica.rejects_aborts = False
    if remedy == "recovers":
        with pytest.raises(StateDictError):
            await router.pull_state_dict(2)
        await asyncio.sleep(10.0)
    elif remedy == "accepts the next abort":
        await cancel_request("other")
    else:
        router.remove_replica("first")
        replica = SecondPullFails("second")
        await router.add_replica(replica)
    await cancel_request("r")
    assert replica.engine_ids[-1] == "r"
    await router.close()

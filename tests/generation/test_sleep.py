"""Sleep: engines release their memory while a trainer uses the GPU."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from thread_ranks import ThreadRanks

from titan_rl.core.errors import EngineDeadError, GenerationError
from titan_rl.generation.continuation import resume_on_abort
from titan_rl.generation.engine import TokenDelta
from titan_rl.generation.loop.calls import Weights
from titan_rl.generation.loop.engine_loop import EngineLoop, LocalReplica
from titan_rl.generation.loop.ranks import EngineRank, follow_leader
from titan_rl.generation.request import EngineRequest
from titan_rl.generation.router import GeneratorRouter, LeastLoaded
from titan_rl.generation.scripted_engine import ScriptedEngine
from titan_rl.types import FinishReason, SamplingParams, VersionSpan

WEIGHTS = [("weight", 1.0)]


class Sleeper(ScriptedEngine):
    """Engine that records its sleep, wake and load calls, and does nothing else while asleep."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.calls: list[str] = []

    @property
    def asleep(self) -> bool:
        return bool(self.calls) and self.calls[-1] == "sleep"

    def sleep(self) -> None:
        assert not self.asleep
        assert not self._running
        self.calls.append("sleep")

    def wake(self) -> None:
        assert self.asleep
        self.calls.append("wake")

    def add(self, request: EngineRequest) -> None:
        assert not self.asleep
        super().add(request)

    def step(self) -> list[TokenDelta]:
        assert self.calls[-1:] in ([], ["load"]), "its weights are gone"
        return super().step()

    def load_state_dict(self, items: Iterable[tuple[str, Any]], version: int) -> None:
        assert not self.asleep
        if self.calls:
            self.calls.append("load")
        super().load_state_dict(items, version)


async def test_sleep_pause_aborts_requests_and_a_pull_wakes_the_engine() -> None:
    engine = Sleeper(block_at_step=3)
    loop = EngineLoop(lambda: engine)
    await loop.start()
    call = asyncio.ensure_future(loop.generate([1], request_id="a", sampling=SamplingParams(max_tokens=8)))
    assert await asyncio.to_thread(engine.started.wait, 10)
    pause = asyncio.ensure_future(loop.pause("sleep"))
    await asyncio.sleep(0)
    engine.release.set()
    await pause
    assert engine.calls == ["sleep"]
    assert ((await call).finish_reason, (await call).version_spans) == (FinishReason.ABORT, (VersionSpan(0, 3),))
    late = await loop.generate([1], request_id="late", sampling=SamplingParams(max_tokens=8))
    assert late.finish_reason is FinishReason.ABORT
    await loop.pull(1, lambda: WEIGHTS)
    await loop.abort()
    assert engine.calls == ["sleep", "wake", "load"], "a pull wakes it, and it stays awake"
    await loop.resume()
    assert len((await loop.generate([1], request_id="b", sampling=SamplingParams(max_tokens=8))).token_ids) == 8
    await loop.close()


async def test_engine_that_slept_serves_nothing_before_a_pull() -> None:
    engine = Sleeper()
    loop = EngineLoop(lambda: engine)
    await loop.start()
    await loop.pause("sleep")
    await loop.resume()
    with pytest.raises(GenerationError, match="has slept, and no version was pulled since"):
        await loop.generate([1], request_id="a", sampling=SamplingParams(max_tokens=8))
    await loop.pull(0, lambda: WEIGHTS)
    assert len((await loop.generate([1], request_id="b", sampling=SamplingParams(max_tokens=8))).token_ids) == 8
    await loop.close()


async def test_engine_without_sleep_fails_and_names_the_setting() -> None:
    loop = EngineLoop(ScriptedEngine)
    await loop.start()
    with pytest.raises(EngineDeadError, match=r"ScriptedEngine cannot sleep; set scheduling\.on_batch_ready"):
        await loop.pause("sleep")
    await loop.close()


@contextmanager
def following(ranks: ThreadRanks, engine: Sleeper) -> Iterator[None]:
    def follow() -> None:
        follow_leader(EngineRank(lambda: engine, ranks), lambda _: Weights(WEIGHTS))

    thread = threading.Thread(target=follow)
    thread.start()
    yield
    thread.join(10)
    assert not thread.is_alive()


async def test_all_ranks_of_a_replica_sleep_and_wake_together() -> None:
    (leader, follower), engines = ThreadRanks.make(2), [Sleeper(), Sleeper()]
    with following(follower, engines[1]):
        loop = EngineLoop(lambda: engines[0], ranks=leader)
        await loop.start()
        for version in (1, 2):
            await loop.pause("sleep")
            await loop.pull(version, lambda: WEIGHTS)
            await loop.resume()
            await loop.generate([1], request_id=f"r{version}", sampling=SamplingParams(max_tokens=2))
        await loop.close()
    assert engines[0].calls == engines[1].calls == ["sleep", "wake", "load"] * 2


async def test_requests_resume_after_each_colocated_training_step() -> None:
    engines = [Sleeper(vocab_size=64), Sleeper(vocab_size=64)]
    replicas = [
        LocalReplica(f"r{index}", EngineLoop(lambda index=index: engines[index]), lambda _: WEIGHTS)
        for index in range(2)
    ]
    for replica in replicas:
        await replica.loop.start()
    router = GeneratorRouter(replicas, LeastLoaded())
    generate = resume_on_abort(router.generate, wait_until_resumed=router.wait_resumed)
    sampling = SamplingParams(max_tokens=3000, stop_token_ids=())
    calls = [asyncio.ensure_future(generate([n], request_id=f"g{n}", sampling=sampling)) for n in range(1, 7)]
    for version in (1, 2, 3):
        await asyncio.sleep(0.01)
        await router.pause("sleep")
        assert all(engine.asleep for engine in engines)  # here the trainer has the memory
        await router.pull_state_dict(version)
        await router.resume()
    completions = await asyncio.gather(*calls)
    assert {len(completion.token_ids) for completion in completions} == {3000}
    await router.close()

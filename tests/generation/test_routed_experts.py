"""Routed experts of each token: the requests that receive them, and errors when they are missing."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from titan_rl.core.errors import GenerationError, RequestError
from titan_rl.generation.continuation import resume_on_abort
from titan_rl.generation.engine import TokenDelta
from titan_rl.generation.loop.engine_loop import EngineLoop, LocalReplica
from titan_rl.generation.router import GeneratorRouter
from titan_rl.generation.scripted_engine import ScriptedEngine
from titan_rl.rollout.types import Rollout, RolloutGroup, Turn
from titan_rl.scheduling.filters import BY_NAME
from titan_rl.scheduling.lease import Lease
from titan_rl.scheduling.scheduler import GroupScheduler
from titan_rl.scheduling.settings import SchedulingConfig
from titan_rl.types import Completion, FinishReason, GenerateFn, SamplingParams, VersionSpan

EXPERTS = (3, 2, 8)  # layers, experts per token, experts
ASKING = SamplingParams(max_tokens=12, return_routed_experts=True)


class Forgetful(ScriptedEngine):
    """Engine that omits the routed experts of its third token."""

    def step(self) -> list[TokenDelta]:
        deltas = super().step()
        if self.num_steps != 3:
            return deltas
        return [TokenDelta(d.request_id, d.token_ids, d.logprobs, d.finish_reason) for d in deltas]


@pytest.mark.parametrize("wrap", [lambda generate: generate, resume_on_abort], ids=["loop", "resumed"])
@pytest.mark.parametrize("offered", [True, False])
@pytest.mark.parametrize("asked", [True, False])
async def test_routed_experts_are_returned_when_enabled_and_requested(
    offered: bool, asked: bool, wrap: Callable[[GenerateFn], GenerateFn]
) -> None:
    loop = EngineLoop(lambda: ScriptedEngine(experts=EXPERTS), routed_experts=offered)
    await loop.start()
    sampling = SamplingParams(max_tokens=5, return_routed_experts=asked)
    generating = wrap(loop.generate)([1, 2], request_id="a", sampling=sampling)
    if asked and not offered:
        with pytest.raises(RequestError, match=r"set generation\.return_routed_experts = true"):
            await generating
    elif asked:
        assert np.shape((await generating).routed_experts) == (5, 3, 2)
    else:
        assert (await generating).routed_experts is None
    await loop.close()


def test_completion_rejects_missing_rows_of_routed_experts() -> None:
    spans = (VersionSpan(0, 3),)
    with pytest.raises(ValueError, match="3 token_ids and 2 rows in routed_experts"):
        Completion("a", [1, 2, 3], [-1.0] * 3, FinishReason.STOP, spans, [[[0]], [[1]]])


async def test_token_without_routed_experts_fails_only_its_request() -> None:
    engine = Forgetful(experts=EXPERTS)
    loop = EngineLoop(lambda: engine, routed_experts=True)
    await loop.start()
    with pytest.raises(GenerationError, match="'a' asked for routed experts"):
        await loop.generate([1, 2], request_id="a", sampling=ASKING)
    assert not engine.step()
    assert len((await loop.generate([1, 2], request_id="b", sampling=ASKING)).routed_experts) == 12
    await loop.close()


async def test_request_fails_when_the_engine_returns_no_routed_experts() -> None:
    loop = EngineLoop(ScriptedEngine, routed_experts=True)
    await loop.start()
    with pytest.raises(GenerationError, match="routed experts"):
        await loop.generate([1, 2], request_id="a", sampling=ASKING)
    await loop.close()


async def test_resumed_request_has_the_same_routed_experts() -> None:
    engines = [ScriptedEngine(experts=EXPERTS, block_at_step=5), ScriptedEngine(experts=EXPERTS)]
    loops = [EngineLoop(lambda engine=engine: engine, routed_experts=True) for engine in engines]
    for loop in loops:
        await loop.start()
    router = GeneratorRouter([LocalReplica("a", loops[0], lambda _: ())])
    generate = resume_on_abort(router.generate)
    request = asyncio.ensure_future(generate([1, 2], request_id="a", sampling=ASKING))
    assert await asyncio.to_thread(engines[0].started.wait, 10)
    aborting = asyncio.ensure_future(loops[0].abort(["a"]))
    await asyncio.sleep(0)
    engines[0].release.set()
    await aborting
    resumed = await request
    await router.close()
    undisturbed = await loops[1].generate([1, 2], request_id="a", sampling=ASKING)
    await loops[1].close()
    assert resumed.metrics["num_resumes"] == 1
    assert resumed.token_ids == undisturbed.token_ids
    assert np.array_equal(resumed.routed_experts, undisturbed.routed_experts)


async def test_routed_experts_of_a_filtered_group_are_freed() -> None:
    kept: list[weakref.ref[np.ndarray]] = []
    dropped: list[weakref.ref[np.ndarray]] = []

    def completion(index: int, sibling: int) -> Completion:
        experts = np.zeros((4, *EXPERTS[:2]), np.uint8)
        (dropped if index % 2 else kept).append(weakref.ref(experts))
        spans = (VersionSpan(0, 4),)
        return Completion(f"{index}/{sibling}", [1] * 4, [-1.0] * 4, FinishReason.STOP, spans, experts)

    async def run_group(lease: Lease) -> RolloutGroup:
        rewards: Sequence[float] = (1.0, 1.0) if lease.index % 2 else (0.0, 1.0)
        rollouts = [
            Rollout(f"g{lease.index}/{n}", f"g{lease.index}", n, None, reward=reward, advantage=reward - 0.5)
            for n, reward in enumerate(rewards)
        ]
        for rollout in rollouts:
            rollout.turns.append(Turn([1], completion(lease.index, rollout.sibling)))
            lease.rollout_finished(rollout)
        return RolloutGroup(f"g{lease.index}", None, rollouts)

    config = SchedulingConfig(groups_per_step=2, max_staleness=0)
    filters = [BY_NAME["zero_variance"]]
    scheduler = GroupScheduler(run_group, config, group_size=2, budget=100, filters=filters)
    running = asyncio.ensure_future(scheduler.run())
    batch = await scheduler.next_batch()
    gc.collect()
    assert dropped
    assert not any(experts() is not None for experts in dropped)
    assert [len(group.rollouts) for group in batch.groups] == [2, 2]
    assert sum(experts() is not None for experts in kept) >= 4
    running.cancel()

"""Rollouts that training interrupts: every token keeps the version and the logprob it was sampled with."""

import asyncio

import pytest
from background import HANG_S

from titan_rl import (
    Completion,
    GeneratorRouter,
    Reward,
    Rollouter,
    RolloutGroup,
    RolloutStatus,
    Rubric,
    SamplingParams,
    TokenObservation,
    TokenStep,
)
from titan_rl.generation.continuation import resume_on_abort
from titan_rl.generation.loop.engine_loop import EngineLoop, LocalReplica
from titan_rl.generation.scripted_engine import CostModel, ScriptedEngine, scripted_logprobs
from titan_rl.scheduling.lease import Lease
from titan_rl.scheduling.scheduler import GroupScheduler
from titan_rl.scheduling.settings import SchedulingConfig


class OneAnswer:
    def __init__(self, sample: int) -> None:
        self._prompt = [sample, 1, 2]

    async def reset(self) -> TokenObservation:
        return TokenObservation(self._prompt)

    async def step(self, completion: Completion) -> TokenStep:
        return TokenStep(status=RolloutStatus.COMPLETED)

    async def close(self) -> None: ...


@pytest.mark.parametrize("tail", ["carry_over", "tail_batch"])
@pytest.mark.parametrize("mode", ["continue", "keep", "abort"])
async def test_interrupted_rollouts_have_correct_versions_and_logprobs(mode, tail):
    settings = SchedulingConfig(
        groups_per_step=2, max_staleness=1, oversample=1.0, on_batch_ready=mode, tail=tail, window=6
    )
    replicas = [
        LocalReplica(
            name,
            EngineLoop(lambda: ScriptedEngine(max_running=8, cost=CostModel(step=1e-4))),
            lambda version: [("weight", version)],
        )
        for name in ("a", "b")
    ]
    for replica in replicas:
        await replica.loop.start()
    router = GeneratorRouter(replicas)
    await router.pull_state_dict(0)
    rollouter = Rollouter(OneAnswer, Rubric([Reward(lambda r: r.sibling, name="sibling")]), max_context=4096)
    lengths = [10, 10, 400, 10, 10, 10, 300, 10, 10, 10, 10, 10, 200, 10, 10, 10]

    async def run_group(lease: Lease) -> RolloutGroup:
        async def both_open() -> None:
            await lease.suspension.wait_resumed()
            await router.wait_resumed()

        generate = resume_on_abort(lease.suspension.guard(router.generate, router.abort), wait_until_resumed=both_open)
        length = lengths[lease.index]
        return await rollouter.run_group(
            generate,
            lease.index,
            group_id=str(lease.index),
            group_size=2,
            sampling=SamplingParams(max_tokens=length, min_tokens=length),
            on_finished=lease.rollout_finished,
        )

    scheduler = GroupScheduler(run_group, settings, group_size=2, budget=len(lengths))
    running = asyncio.ensure_future(scheduler.run())
    interrupted = 0
    for step in range(len(lengths) // 2):
        batch = await asyncio.wait_for(scheduler.next_batch(), HANG_S)
        if mode != "continue":
            await router.pause(mode)
        await router.pull_state_dict(step + 1)
        if mode != "continue":
            await router.resume()
        for group in batch.groups:
            for rollout in group.rollouts:
                (turn,) = rollout.turns
                completion = turn.completion
                whole = [*turn.prompt_token_ids, *completion.token_ids]
                assert len(completion.token_ids) == lengths[int(group.group_id)]
                by_version = {v: scripted_logprobs(whole, v) for v in set(completion.versions)}
                expected = [by_version[v][2 + t] for t, v in enumerate(completion.versions)]
                assert list(completion.logprobs) == expected
                assert completion.versions == sorted(completion.versions)
                interrupted += len(by_version) > 1
        batch.release()
    assert interrupted
    running.cancel()
    await router.close()

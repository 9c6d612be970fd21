"""With staleness 0, data, losses and weights are bitwise identical to those of a synchronous loop."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from background import HANG_S

pytest.importorskip("torchtitan", reason="needs the cpu or gpu extra")

import torch
from tiny_policy import make_tiny_qwen3, make_trainer, weights

from titan_rl import (
    Completion,
    Reward,
    Rollouter,
    RolloutGroup,
    RolloutStatus,
    Rubric,
    SamplingParams,
    TokenObservation,
    TokenStep,
)
from titan_rl.generation.loop.engine_loop import EngineLoop, LocalReplica
from titan_rl.generation.router import GeneratorRouter
from titan_rl.generation.scripted_engine import ScriptedEngine
from titan_rl.scheduling.lease import Lease
from titan_rl.scheduling.scheduler import GroupScheduler
from titan_rl.scheduling.settings import SchedulingConfig
from titan_rl.training.data.sample import TrainingSample
from titan_rl.training.data.sample_builder import build_samples

STEPS, GROUPS, SIBLINGS = 4, 3, 4


class TwoTurns:
    def __init__(self, sample: int) -> None:
        self._tokens, self._turn = [sample % 100, 7], 0

    async def reset(self) -> TokenObservation:
        return TokenObservation(self._tokens)

    async def step(self, completion: Completion) -> TokenStep:
        self._turn += 1
        self._tokens = [*self._tokens, *completion.token_ids, 100 + self._turn]
        return TokenStep(status=RolloutStatus.COMPLETED) if self._turn == 2 else TokenStep(self._tokens)

    async def close(self) -> None: ...


class Stack:
    """Two scripted engines, whose tokens depend on the version, and the real trainer."""

    def __init__(self, folder: Path) -> None:
        self.trainer = make_trainer(folder)
        self.losses: list[float] = []
        self.data: list[list[str]] = []
        self.version = 0
        self.rollouter = Rollouter(
            TwoTurns, Rubric([Reward(lambda r: r.turns[0].completion.token_ids[0] % 5, name="mod")]), max_context=512
        )

    async def start(self) -> None:
        self.replicas = [
            LocalReplica(
                name, EngineLoop(lambda: ScriptedEngine(mean_tokens=12, tokens_depend_on_version=True)), lambda v: []
            )
            for name in ("a", "b")
        ]
        for replica in self.replicas:
            await replica.loop.start()
        self.router = GeneratorRouter(self.replicas)
        await self.router.pull_state_dict(0)

    async def group(self, index: int) -> RolloutGroup:
        sampling = SamplingParams(max_tokens=40, stop_token_ids=(3,))
        return await self.rollouter.run_group(
            self.router.generate, index, group_id=f"g{index}", group_size=SIBLINGS, sampling=sampling
        )

    async def train(self, groups: list[RolloutGroup]) -> None:
        samples: list[TrainingSample] = [sample for group in groups for sample in build_samples(group, 1.0)]
        result = self.trainer.step(samples)
        self.losses.append(result.metrics["loss"])
        self.data.append([group.group_id for group in groups])
        await self.router.pull_state_dict(result.version)


async def plain(folder: Path) -> Stack:
    stack = Stack(folder)
    await stack.start()
    for step in range(STEPS):
        first = step * GROUPS
        await stack.train(list(await asyncio.gather(*(stack.group(first + n) for n in range(GROUPS)))))
    await stack.router.close()
    return stack


async def scheduled(folder: Path) -> Stack:
    stack = Stack(folder)
    await stack.start()

    async def run_group(lease: Lease) -> RolloutGroup:
        return await stack.group(lease.index)

    settings = SchedulingConfig(groups_per_step=GROUPS, max_staleness=0)
    async with (
        asyncio.timeout(HANG_S),
        GroupScheduler(run_group, settings, group_size=SIBLINGS, budget=STEPS * GROUPS) as scheduler,
    ):
        async for batch in scheduler.batches():
            await stack.train(batch.groups)
    await stack.router.close()
    return stack


async def test_staleness_zero_is_bitwise_identical_to_the_synchronous_loop(tmp_path: Path) -> None:
    folder = make_tiny_qwen3(tmp_path / "model")
    one, other = await plain(folder), await scheduled(folder)
    assert one.data == other.data == [[f"g{step * GROUPS + n}" for n in range(GROUPS)] for step in range(STEPS)]
    assert one.losses == other.losses
    ours, theirs = weights(one.trainer), weights(other.trainer)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)

"""Many rollouts during random pauses, aborts, resumes, pulls and deaths: the results are the undisturbed ones."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
from collections import Counter

import pytest
from background import HANG_S
from depth import DEEP

from titan_rl import (
    Completion,
    FinishReason,
    Reward,
    Rollout,
    Rollouter,
    RolloutStatus,
    Rubric,
    SamplingParams,
    TokenObservation,
    TokenStep,
)
from titan_rl.core.errors import EngineDeadError, GenerationError
from titan_rl.generation.continuation import resume_on_abort
from titan_rl.generation.loop.engine_loop import EngineLoop, LocalReplica
from titan_rl.generation.router import GeneratorRouter, Limits
from titan_rl.generation.scripted_engine import CostModel, ScriptedEngine, scripted_logprobs
from titan_rl.rollout.settings import RolloutConfig
from titan_rl.types import GenerateFn

pytestmark = pytest.mark.slow

GROUPS, SIBLINGS, TURNS, EVENTS = (25, 8, 14, 1000) if DEEP else (8, 8, 10, 200)
SAMPLING = SamplingParams(max_tokens=60, stop_token_ids=(3,))
LIMITS = Limits(
    no_replica_s=20, paused_s=20, pull_s=5, drain_s=0.02, finish_s=0.02, abort_s=2, reabort_interval_s=0.05,
    cancel_s=1, call_s=2, quarantine_s=0.01, max_quarantine_s=0.05,
)  # fmt: skip


class Conversation:
    """Environment of `TURNS` turns, each of which appends a marker to the conversation."""

    def __init__(self, start: int) -> None:
        self._tokens, self._turn = [start, start + 1], 0

    async def reset(self) -> TokenObservation:
        return TokenObservation(self._tokens)

    async def step(self, completion: Completion) -> TokenStep:
        self._turn += 1
        self._tokens = [*self._tokens, *completion.token_ids, 100 + self._turn]
        if self._turn == TURNS:
            return TokenStep(status=RolloutStatus.COMPLETED)
        return TokenStep(self._tokens)

    async def close(self) -> None: ...


def continue_after_length(generate: GenerateFn) -> GenerateFn:
    """Treat a completion cut by its budget as stopped, so that every rollout has all its turns."""

    async def whole(prompt_token_ids, *, request_id, session_id=None, sampling) -> Completion:
        completion = await generate(prompt_token_ids, request_id=request_id, session_id=session_id, sampling=sampling)
        assert completion.finish_reason in (FinishReason.STOP, FinishReason.LENGTH), completion.finish_reason
        return Completion(
            completion.request_id,
            completion.token_ids,
            completion.logprobs,
            FinishReason.STOP,
            completion.version_spans,
        )

    return whole


def start_replica(name: str, step_s: float) -> LocalReplica:
    def engine() -> ScriptedEngine:
        return ScriptedEngine(mean_tokens=40, max_running=8, cost=CostModel(step=step_s))

    return LocalReplica(name, EngineLoop(engine, stream_interval=4), lambda version: [("weight", version)])


async def play(generate: GenerateFn) -> list[Rollout]:
    rollouter = Rollouter(
        Conversation,
        Rubric([Reward(lambda rollout: len(rollout.turns), name="turns")]),
        max_context=4096,
        limits=RolloutConfig(max_turns=TURNS + 1),
    )
    async with asyncio.TaskGroup() as tasks:
        groups = [
            tasks.create_task(
                rollouter.run_group(
                    continue_after_length(generate),
                    200 + index,
                    group_id=f"g{index}",
                    group_size=SIBLINGS,
                    sampling=SAMPLING,
                )
            )
            for index in range(GROUPS)
        ]
    return [rollout for group in groups for rollout in group.result().rollouts]


async def undisturbed() -> list[Rollout]:
    replica = start_replica("calm", 0.0)
    await replica.loop.start()
    try:
        return await play(replica.loop.generate)
    finally:
        await replica.close()


logprobs_of = functools.cache(scripted_logprobs)


class Storm:
    """Three replicas, and random events on them in an order drawn from a seed."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._replicas = {f"replica-{index}": start_replica(f"replica-{index}", 0.002) for index in range(3)}
        self._num_born = 3
        self._version = 0
        self.events: Counter[str] = Counter()
        self.num_disturbing = 0  # events during running requests
        self.router = GeneratorRouter(self._replicas.values(), max_attempts=1000, limits=LIMITS)

    async def start(self) -> None:
        for replica in self._replicas.values():
            await replica.loop.start()
        await self.router.pull_state_dict(0)

    async def rage(self) -> None:
        for _ in range(EVENTS):
            if self.router.paused is not None and self._rng.random() < 0.7:
                event = "resume"
            else:
                event = self._rng.choice(["pause", "abort", "abort_some", "pull", "pull", "drain", "kill", "breathe"])
            self.events[event] += 1
            self.num_disturbing += any(replica.num_requests for replica in self.router.replicas)
            async with asyncio.timeout(HANG_S):
                await getattr(self, f"_{event}")()
        if self.router.paused is not None:
            await self.router.resume()

    async def _pause(self) -> None:
        with contextlib.suppress(RuntimeError):  # already paused
            await self.router.pause(self._rng.choice(["keep", "wait", "abort"]))

    async def _resume(self) -> None:
        await self.router.resume()

    async def _abort(self) -> None:
        await self.router.abort()

    async def _abort_some(self) -> None:
        turns = [f"g{self._rng.randrange(GROUPS)}/{self._rng.randrange(SIBLINGS)}/{turn}" for turn in range(TURNS)]
        assert await self.router.abort([*turns, "unknown"]) == ()

    async def _pull(self) -> None:
        self._version += 1
        await self.router.pull_state_dict(self._version)

    async def _drain(self) -> None:
        if self.router.paused is None:
            self._version += 1
            await self.router.pull_state_dict(self._version, mode="drain")

    async def _kill(self) -> None:
        name = self._rng.choice(sorted(self._replicas))
        await self._replicas.pop(name).close()
        self.router.remove_replica(name)
        born = start_replica(f"replica-{self._num_born}", 0.002)
        self._num_born += 1
        self._replicas[born.name] = born
        await born.loop.start()
        await self.router.add_replica(born)

    async def _breathe(self) -> None:
        with contextlib.suppress(TimeoutError):  # some engine steps
            await asyncio.wait_for(asyncio.Event().wait(), 0.002)

    async def close(self) -> None:
        await self.router.close()


async def test_rollouts_are_unaffected_by_a_storm_of_events() -> None:
    calm = await undisturbed()
    storm = Storm(seed=7)
    await storm.start()
    generate = resume_on_abort(storm.router.generate, wait_until_resumed=storm.router.wait_resumed, max_attempts=10_000)
    try:
        async with asyncio.timeout(HANG_S):
            playing = asyncio.ensure_future(play(generate))
            await storm.rage()
            rollouts = await playing
        assert storm.events.total() == EVENTS
        assert storm.num_disturbing > EVENTS / 2
        assert (
            min(storm.events[event] for event in ("pause", "resume", "abort", "abort_some", "pull", "kill"))
            > EVENTS / 50
        )
        assert [rollout.status for rollout in rollouts] == [RolloutStatus.COMPLETED] * (GROUPS * SIBLINGS)
        assert [replica.load for replica in storm.router.replicas] == [0, 0, 0]
        versions: set[int] = set()
        for rollout, reference in zip(rollouts, calm, strict=True):
            assert rollout.rollout_id == reference.rollout_id
            for turn, expected in zip(rollout.turns, reference.turns, strict=True):
                assert list(turn.prompt_token_ids) == list(expected.prompt_token_ids)
                assert list(turn.completion.token_ids) == list(expected.completion.token_ids)
            # The tokens of every turn are a prefix of those of the last turn, which siblings share.
            last = rollout.turns[-1]
            sequence = (*last.prompt_token_ids, *last.completion.token_ids)
            for turn in rollout.turns:
                start = len(turn.prompt_token_ids)
                stamped = zip(turn.completion.logprobs, turn.completion.versions, strict=True)
                for position, (logprob, version) in enumerate(stamped, start):
                    assert logprob == logprobs_of(sequence, version)[position - 1]
                versions.update(turn.completion.versions)
        assert len(versions) > 10
    except (GenerationError, EngineDeadError) as error:
        raise AssertionError("the storm reached a caller") from error
    finally:
        await storm.close()

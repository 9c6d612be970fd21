"""`rollout_timeout_s`: interrupts a rollout, counts only its own time, and keeps its finished turns."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from depth import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from stage import Env, Generator, Stage
from virtual_time import in_virtual_time

from benchmarks.simulated_replica import SimulatedReplica
from titan_rl import Completion, FinishReason, RolloutGroup, RolloutStatus, TokenStep
from titan_rl.core.calls import stopwatch
from titan_rl.core.calls.stopwatch import SILENCE_S, Stopwatch, moving_with_tokens
from titan_rl.generation.continuation import resume_on_abort
from titan_rl.generation.router import GeneratorRouter
from titan_rl.generation.scripted_engine import CostModel
from titan_rl.rollout.group.turns import RETURN_S
from titan_rl.rollout.rewards.reward import Reward
from titan_rl.rollout.rewards.rubric import Rubric
from titan_rl.rollout.settings import RolloutConfig
from titan_rl.training.data.sample_builder import build_samples

pytestmark = pytest.mark.looptime
LIMITS = RolloutConfig(rollout_timeout_s=30.0, max_turns=99)


class Slow:
    """`GenerateFn` that takes `seconds` for each turn after the first `fast_turns`, and reports given metrics."""

    def __init__(self, seconds: float, metrics: dict[str, float] | None = None, fast_turns: int = 0) -> None:
        self._seconds, self._metrics, self._fast_turns = seconds, metrics or {}, fast_turns

    async def __call__(self, prompt_token_ids: Sequence[int], *, request_id: str, **kwargs: Any) -> Completion:
        if int(request_id.rpartition("/")[2]) >= self._fast_turns:
            await asyncio.sleep(self._seconds)
        completion = await Generator()(prompt_token_ids, request_id=request_id, **kwargs)
        return replace(completion, metrics=self._metrics)


def stage_of(turns: int = 3, **kwargs: Any) -> Stage:
    return Stage(lambda _: Env(turns=turns), **{"limits": LIMITS, "max_context": 10_000} | kwargs)


async def test_generation_is_interrupted_at_the_limit_and_earlier_turns_are_kept() -> None:
    stage = stage_of()
    group = await stage.group(Slow(1e6, fast_turns=2), size=2)
    for rollout in group.rollouts:
        assert (rollout.status, len(rollout.turns)) == (RolloutStatus.TRUNCATED_TIME, 2)
        assert rollout.status.is_truncated
        assert rollout.error == "its own time is up: rollout_timeout_s is 30"
        assert rollout.metrics["seconds"] == pytest.approx(30.0)
        assert rollout.metrics["own_seconds"] == pytest.approx(30.0)
    assert [rollout.reward for rollout in group.rollouts] == [0.0, 1.0]
    assert build_samples(group, temperature=1.0)
    assert stage.all_released(2)


async def test_rollout_without_turns_at_the_limit_is_an_error() -> None:
    (rollout,) = (await stage_of().group(Slow(1e6))).rollouts
    assert (rollout.status, rollout.turns, rollout.reward) == (RolloutStatus.ERROR_TIMEOUT, [], None)
    assert rollout.metrics["seconds"] == pytest.approx(30.0)


async def test_truncated_reward_applies_at_the_time_limit() -> None:
    rubric = Rubric([Reward(lambda rollout: 1.0, name="one")], truncated_reward=-1.0)
    (rollout,) = (await stage_of(rubric=rubric).group(Slow(1e6, fast_turns=1))).rollouts
    assert rollout.reward == -1.0


@pytest.mark.parametrize(
    ("metrics", "num_turns"),
    [({}, 2), ({"queue_s": 11.0}, 8), ({"interrupted_s": 11.0}, 8), ({"queue_s": 6.0, "interrupted_s": 5.0}, 8)],
)
async def test_waiting_reported_by_a_completion_does_not_count(metrics: dict[str, float], num_turns: int) -> None:
    (rollout,) = (await stage_of(turns=8).group(Slow(12.0, metrics))).rollouts
    assert len(rollout.turns) == num_turns
    whole = rollout.status is RolloutStatus.COMPLETED
    assert whole == (num_turns == 8)
    assert rollout.metrics["own_seconds"] == pytest.approx(8.0 if whole else 30.0)


async def test_time_with_a_paused_stopwatch_does_not_count() -> None:
    async def generate(prompt_token_ids: Sequence[int], **kwargs: Any) -> Completion:
        with stopwatch.paused():
            await asyncio.sleep(1000.0)
        await asyncio.sleep(1.0)
        return await Generator()(prompt_token_ids, **kwargs)

    (rollout,) = (await stage_of(turns=2).group(generate)).rollouts
    assert rollout.status is RolloutStatus.COMPLETED
    assert rollout.metrics["own_seconds"] == pytest.approx(2.0)
    assert rollout.metrics["seconds"] == pytest.approx(2002.0)


async def test_environment_time_counts_and_a_timely_answer_is_processed() -> None:
    async def slow_step(env: Env) -> None:
        await asyncio.sleep(0.5 if env.steps == 2 else 29.0)

    async def generate(prompt_token_ids: Sequence[int], *, request_id: str, **kwargs: Any) -> Completion:
        await asyncio.sleep(0.9 if request_id.endswith("/1") else 0.0)
        return await Generator()(prompt_token_ids, request_id=request_id, **kwargs)

    stage = Stage(lambda _: Env(turns=2, on_step=slow_step), limits=LIMITS)
    (rollout,) = (await stage.group(generate)).rollouts
    assert rollout.status is RolloutStatus.COMPLETED
    assert rollout.turns[1].rewards == {"last": 1.0}
    assert rollout.metrics["own_seconds"] == pytest.approx(30.4)


async def test_slow_steps_end_at_the_limit_and_keep_their_turns() -> None:
    stage = Stage(lambda _: Env(turns=99, on_step=lambda _: asyncio.sleep(8.0)), limits=LIMITS, max_context=10_000)
    (rollout,) = (await stage.group(Generator())).rollouts
    assert (rollout.status, len(rollout.turns)) == (RolloutStatus.TRUNCATED_TIME, 4)
    assert "rollout_timeout_s" in (rollout.error or "")
    assert rollout.metrics["seconds"] == pytest.approx(30.0)


async def test_waiting_for_siblings_does_not_count() -> None:
    """All answers of a group take the same time, so the one that is served last must not be cut off."""
    one_at_a_time = asyncio.Lock()

    async def generate(prompt_token_ids: Sequence[int], **kwargs: Any) -> Completion:
        with stopwatch.paused():
            await one_at_a_time.acquire()
        try:
            await asyncio.sleep(20.0)
        finally:
            one_at_a_time.release()
        return await Generator()(prompt_token_ids, **kwargs)

    group = await stage_of(turns=1).group(generate, size=8)
    assert [rollout.status for rollout in group.rollouts] == [RolloutStatus.COMPLETED] * 8
    assert max(rollout.metrics["seconds"] for rollout in group.rollouts) == pytest.approx(160.0)


@asynccontextmanager
async def routed(max_running: int = 8, length: int = 1 << 30) -> AsyncGenerator[tuple[GeneratorRouter, Any]]:
    """Router over one engine that generates a token per second for each of up to `max_running` requests."""
    replica = SimulatedReplica(
        "engine",
        lambda request_id, num_prompt_tokens: length,
        CostModel(step=1.0),
        max_running=max_running,
        kv_tokens=1 << 30,
        stream_interval=1,
    )
    router = GeneratorRouter([replica], stall_timeout_s=1e6)
    running = asyncio.ensure_future(replica.run())
    try:
        await router.pull_state_dict(0)
        yield router, resume_on_abort(router.generate, wait_until_resumed=router.wait_resumed)
    finally:
        running.cancel()


async def test_routed_request_returns_its_tokens_when_time_is_up() -> None:
    seen: list[Completion] = []

    class Looking(Env):
        async def step(self, completion: Completion) -> TokenStep:
            seen.append(completion)
            return TokenStep(status=RolloutStatus.TRUNCATED_LENGTH, messages=[{"role": "assistant", "content": "so"}])

    async with routed() as (_, generate):
        stage = Stage(lambda _: Looking(), limits=LIMITS, max_context=10_000)
        (rollout,) = (await stage.group(generate, max_tokens=5_000)).rollouts
    assert rollout.status is RolloutStatus.TRUNCATED_TIME
    assert 29 <= rollout.num_completion_tokens <= 32
    assert rollout.turns[0].completion.finish_reason is FinishReason.LENGTH
    assert [len(completion.token_ids) for completion in seen] == [rollout.num_completion_tokens]
    assert rollout.messages[-1] == {"role": "assistant", "content": "so"}
    assert rollout.reward == 0.0
    assert rollout.metrics["own_seconds"] == pytest.approx(30.0, abs=2.0)


async def test_engine_queueing_and_pauses_do_not_count() -> None:
    async with routed(max_running=1, length=15) as (router, generate):
        playing = asyncio.ensure_future(stage_of(turns=1).group(generate, size=4, max_tokens=100))
        await asyncio.sleep(30.0)
        await router.pause("keep")
        await asyncio.sleep(500.0)
        await router.resume()
        await asyncio.sleep(20.0)
        await router.pause("abort")
        await asyncio.sleep(250.0)
        await router.resume()
        group = await playing
    assert [rollout.status for rollout in group.rollouts] == [RolloutStatus.COMPLETED] * 4
    assert max(rollout.metrics["seconds"] for rollout in group.rollouts) > 800
    assert max(rollout.metrics["own_seconds"] for rollout in group.rollouts) < 30


@given(
    max_running=st.integers(1, 2),
    pauses=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 300)), min_size=1, max_size=4),
    size=st.integers(1, 4),
)
@settings(max_examples=examples(50), deadline=None)
def test_pause_is_subtracted_once_from_the_rollout_time(
    max_running: int, pauses: list[tuple[int, int]], size: int
) -> None:
    """Whether the request queues or runs during pauses, it uses one second for each of its tokens."""
    length = 15

    async def play() -> RolloutGroup:
        async with routed(max_running=max_running, length=length) as (router, generate):
            playing = asyncio.ensure_future(stage_of(turns=1).group(generate, size=size, max_tokens=100))
            for after_s, seconds in pauses:
                await asyncio.sleep(after_s)
                await router.pause("keep")
                await asyncio.sleep(seconds)
                await router.resume()
            return await playing

    group = in_virtual_time(play())
    assert [rollout.status for rollout in group.rollouts] == [RolloutStatus.COMPLETED] * size
    for rollout in group.rollouts:
        own_s, metrics = rollout.metrics["own_seconds"], rollout.turns[0].completion.metrics
        # A pause begins during a step, and the first message after it comes with a step.
        assert length - 2 * len(pauses) - 0.1 <= own_s <= length + 0.1
        waited_s = metrics["queue_s"] + metrics.get("interrupted_s", 0.0)
        assert waited_s + length == pytest.approx(rollout.metrics["seconds"], abs=len(pauses) + 0.1)


async def test_time_before_a_request_is_served_does_not_count() -> None:
    """It waits in the engine for longer than its limit, behind a request that uses all of its time."""
    async with routed(max_running=1) as (_, generate):
        group = await stage_of(turns=1).group(generate, size=3, max_tokens=5_000)
    assert [rollout.status for rollout in group.rollouts] == [RolloutStatus.TRUNCATED_TIME] * 3
    assert all(25 <= rollout.num_completion_tokens <= 32 for rollout in group.rollouts)


async def test_request_that_ignores_the_time_limit_is_cancelled() -> None:
    async def stubborn(prompt_token_ids: Sequence[int], **kwargs: Any) -> Completion:
        with stopwatch.ending_with(lambda: None):
            await asyncio.sleep(1e6)
        raise AssertionError

    (rollout,) = (await stage_of().group(stubborn)).rollouts
    assert rollout.status is RolloutStatus.ERROR_TIMEOUT
    assert rollout.metrics["seconds"] == pytest.approx(30.0 + RETURN_S)


async def test_stopwatch_advances_with_the_tokens_of_a_request() -> None:
    watch = Stopwatch(100.0)
    with watch.running(), stopwatch.working_for(watch), moving_with_tokens() as sign:
        await asyncio.sleep(50.0)  # the request queues
        sign(False)
        await asyncio.sleep(1.0)
        sign(True)
        await asyncio.sleep(2.0)
        sign(True)
        assert watch.used_s == pytest.approx(2.0)
        await asyncio.sleep(1.0)
        sign(False)  # the request is preempted
        await asyncio.sleep(20.0)
        sign(True)
        assert watch.used_s == pytest.approx(3.0)
        await asyncio.sleep(500.0)  # the engine does not step
        assert watch.used_s == pytest.approx(3.0 + SILENCE_S)
        sign(True)
        await asyncio.sleep(1.0)
    sign(True)
    await asyncio.sleep(10.0)
    assert watch.used_s == pytest.approx(4.0 + SILENCE_S)
    assert watch.waited_s == pytest.approx(517.0)


@pytest.mark.parametrize("seen_by", ["sign", "timer", "end"])
async def test_time_of_a_blocked_event_loop_does_not_count(seen_by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, late_s = asyncio.get_running_loop(), 0.0
    now = loop.time
    monkeypatch.setattr(loop, "time", lambda: now() + late_s)
    watch = Stopwatch(1000.0)
    with watch.running(), stopwatch.working_for(watch), moving_with_tokens() as sign:
        sign(True)
        late_s = 81.0  # this loop was blocked
        if seen_by == "sign":
            sign(True)
        elif seen_by == "timer":
            await asyncio.sleep(0)
            await asyncio.sleep(0)
    assert watch.used_s == pytest.approx(SILENCE_S)


async def test_stopwatch_counts_only_running_and_unpaused_time() -> None:
    watch = Stopwatch(10.0)
    await asyncio.sleep(5.0)
    assert watch.used_s == 0.0
    reached: list[float] = []
    with watch.running(lambda: reached.append(watch.used_s)):
        await asyncio.sleep(1.0)
        with watch.pause() as outer, watch.pause():
            await asyncio.sleep(50.0)
            outer.end()
            outer.end()
            await asyncio.sleep(50.0)
        await asyncio.sleep(2.0)
        assert (watch.used_s, watch.waited_s) == (pytest.approx(3.0), pytest.approx(100.0))
        watch.correct(-1.0)
        assert not reached
        await asyncio.sleep(9.0)
    assert reached == [pytest.approx(10.0)]
    assert watch.is_over
    assert watch.left_s == pytest.approx(-1.0)

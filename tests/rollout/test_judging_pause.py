"""Judges while generation is paused, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from titan_rl.rollout.environment.types import TokenObservation, TokenStep
from titan_rl.rollout.group.rollouter import JUDGE_GRACE_S, JudgingPause, Rollouter
from titan_rl.rollout.rewards.reward import Reward
from titan_rl.rollout.rewards.rubric import Rubric
from titan_rl.rollout.types import Rollout, RolloutGroup, RolloutStatus
from titan_rl.types import Completion, FinishReason, SamplingParams, VersionSpan


class Env:
    async def reset(self) -> TokenObservation:
        return TokenObservation([1, 2])

    async def step(self, completion: Completion) -> TokenStep:
        return TokenStep(status=RolloutStatus.COMPLETED)

    async def close(self) -> None: ...


async def generate(prompt_token_ids: Sequence[int], *, request_id: str, **_: Any) -> Completion:
    return Completion(request_id, [5], [-0.5], FinishReason.STOP, (VersionSpan(0, 1),))


class Judge:
    """Slow reward that records its starts and cancellations."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.began: list[float] = []
        self.cancelled = 0

    async def __call__(self, rollout: Rollout) -> float:
        self.began.append(asyncio.get_running_loop().time())
        try:
            await asyncio.sleep(self.seconds)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return 1.0 + rollout.sibling


def stage(judge: Judge) -> tuple[Rollouter, asyncio.Future[RolloutGroup]]:
    reward = Reward(judge, name="judge")
    rollouter = Rollouter(lambda _: Env(), Rubric([reward]), max_context=100)
    playing = rollouter.run_group(generate, None, group_id="g", group_size=2, sampling=SamplingParams(max_tokens=4))
    return rollouter, asyncio.ensure_future(playing)


@pytest.mark.looptime
@pytest.mark.parametrize(
    ("seconds", "began", "cancelled"),
    [(4.0, [0.0, 0.0], 0), (14.0, [0.0, 0.0, 101.0, 101.0], 2)],
    ids=["within the grace period", "longer"],
)
async def test_paused_judge_finishes_in_the_grace_period_or_restarts(
    seconds: float, began: list[float], cancelled: int
) -> None:
    judge = Judge(seconds)
    rollouter, playing = stage(judge)
    await asyncio.sleep(1.0)
    rollouter.pause_judging()
    await asyncio.sleep(100.0)
    rollouter.resume_judging()
    group = await playing
    assert judge.began == began
    assert judge.cancelled == cancelled
    assert [rollout.reward for rollout in group.rollouts] == [1.0, 2.0]


@pytest.mark.looptime
async def test_rollout_that_ends_in_a_pause_is_judged_after_it() -> None:
    judge = Judge(1.0)
    rollouter, playing = stage(judge)
    rollouter.pause_judging()
    await asyncio.sleep(50.0)
    assert not judge.began
    rollouter.resume_judging()
    assert (await playing).rollouts[1].reward == 2.0
    assert judge.began == [50.0, 50.0]


@pytest.mark.looptime
async def test_cancelling_a_group_cancels_its_judges() -> None:
    judge = Judge(1e6)
    rollouter, playing = stage(judge)
    await asyncio.sleep(1.0)
    rollouter.pause_judging()
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    assert judge.cancelled == 2


@pytest.mark.looptime
async def test_group_can_be_cancelled_while_a_judge_cleans_up() -> None:
    cleaning = asyncio.Event()

    class Slow(Judge):
        async def __call__(self, rollout: Rollout) -> float:
            try:
                return await super().__call__(rollout)
            finally:
                cleaning.set()
                await asyncio.sleep(1000.0)

    judge = Slow(1e6)
    rollouter, playing = stage(judge)
    await asyncio.sleep(1.0)
    rollouter.pause_judging()
    await cleaning.wait()
    rollouter.resume_judging()
    playing.cancel()
    await asyncio.wait({playing}, timeout=100.0)
    assert playing.cancelled()
    assert len(judge.began) == 2  # none has restarted


@pytest.mark.looptime
async def test_judge_still_cleaning_up_does_not_protect_others_from_a_pause() -> None:
    errors: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    pause, may_end = JudgingPause(1000.0), asyncio.Event()
    began: list[str] = []

    async def judge(name: str) -> None:
        began.append(name)
        try:
            await asyncio.Event().wait()
        finally:
            if name == "slow":
                await may_end.wait()

    async def pause_past_the_grace_period() -> None:
        pause.begin()
        await asyncio.sleep(JUDGE_GRACE_S + 1.0)
        pause.end()
        await asyncio.sleep(1.0)

    judging = [asyncio.ensure_future(pause.run(lambda: judge("slow")))]
    await asyncio.sleep(1.0)
    await pause_past_the_grace_period()
    judging += [asyncio.ensure_future(pause.run(lambda: judge("quick"))) for _ in range(3)]
    await asyncio.sleep(1.0)
    await pause_past_the_grace_period()
    assert began == ["slow", *["quick"] * 6]
    assert errors == []
    may_end.set()
    for each in judging:
        each.cancel()
    await asyncio.wait(judging)


@pytest.mark.looptime
async def test_aborted_rollout_cancels_the_judges_of_its_group() -> None:
    judge = Judge(1000.0)

    async def generate_or_abort(prompt_token_ids: Sequence[int], *, request_id: str, **_: Any) -> Completion:
        if "/1/" not in request_id:
            return await generate(prompt_token_ids, request_id=request_id)
        await asyncio.sleep(5.0)
        return Completion(request_id, [5], [-0.5], FinishReason.ABORT, (VersionSpan(0, 1),))

    rollouter = Rollouter(lambda _: Env(), Rubric([Reward(judge, name="judge")]), max_context=100)
    group = await rollouter.run_group(
        generate_or_abort, None, group_id="g", group_size=2, sampling=SamplingParams(max_tokens=4)
    )
    assert [rollout.status for rollout in group.rollouts] == [RolloutStatus.COMPLETED, RolloutStatus.ABORTED]
    assert (len(judge.began), judge.cancelled) == (1, 1)
    assert asyncio.get_running_loop().time() < 10.0

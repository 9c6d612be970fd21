"""Agent environments, which send requests to the policy themselves: request ids, time limits and errors."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from stage import Generator, Stage

from titan_rl import Completion, Rollout, RolloutStatus, Turn
from titan_rl.rollout.environment.types import RolloutPolicy
from titan_rl.rollout.settings import RolloutConfig
from titan_rl.run.journal.records import encode, group_record
from titan_rl.scheduling.task_mix import Assigned
from titan_rl.training.data.sample_builder import build_samples

pytestmark = pytest.mark.looptime
LIMITS = RolloutConfig(rollout_timeout_s=30.0, env_timeout_s=5.0)
Play = Callable[[RolloutPolicy, Rollout], Coroutine[Any, Any, None]]


class Agent:
    def __init__(self, play: Play) -> None:
        self._play = play
        self.closed = 0

    async def play(self, policy: RolloutPolicy, rollout: Rollout) -> None:
        await self._play(policy, rollout)

    async def close(self) -> None:
        self.closed += 1


def stage_of(play: Play, **kwargs: Any) -> Stage:
    return Stage(lambda _: Agent(play), **{"limits": LIMITS} | kwargs)  # pyright: ignore[reportArgumentType]


async def ask(policy: RolloutPolicy, prompt: list[int], request_id: str) -> Turn:
    completion = await policy.generate(
        prompt, request_id=request_id, session_id=policy.rollout_id, sampling=policy.sampling
    )
    return Turn(prompt, completion, sampling=policy.sampling)


async def two_at_once(policy: RolloutPolicy, rollout: Rollout) -> None:
    rollout.turns = list(await asyncio.gather(ask(policy, [1], "a"), ask(policy, [2], "b")))
    rollout.messages = [{"role": "assistant", "content": "done"}]


async def test_agent_turns_are_scored_and_trained_on() -> None:
    stage = stage_of(two_at_once)
    generate = Generator()
    group = await stage.group(generate, size=2, seed=7)
    assert stage.all_released(2)
    assert [call["sampling"].seed for call in generate.calls] == [7] * 4
    assert {call["session"] for call in generate.calls} == {"g/0", "g/1"}
    for rollout in group.rollouts:
        assert (rollout.status, rollout.reward) == (RolloutStatus.COMPLETED, float(rollout.sibling))
        assert len(rollout.turns) == 2
    assert len(build_samples(group)) == 4


async def test_agent_requests_get_unique_reproducible_ids() -> None:
    """They depend on the request, not on its time, so that a rollout that is run again finds its recorded answers."""

    async def play(policy: RolloutPolicy, rollout: Rollout) -> None:
        prompts = [[1], [1], [2]] if policy.rollout_id == "g/0" else [[2], [1], [1]]
        rollout.turns = list(await asyncio.gather(*(ask(policy, prompt, "same") for prompt in prompts)))

    generate = Generator()
    group = await stage_of(play).group(generate, size=2)
    asked: dict[str, dict[str, list[int]]] = {"g/0": {}, "g/1": {}}
    for call in generate.calls:
        asked[call["session"]][call["request"].removeprefix(call["session"])] = call["prompt"]
    assert len(asked["g/0"]) == 3
    assert asked["g/0"] == asked["g/1"]
    assert {turn.completion.request_id for rollout in group.rollouts for turn in rollout.turns} == {"same"}


async def test_env_seconds_exclude_requests() -> None:
    async def slow(prompt_token_ids: Sequence[int], **kwargs: Any) -> Completion:
        await asyncio.sleep(3.0)
        return await Generator()(prompt_token_ids, **kwargs)

    async def play(policy: RolloutPolicy, rollout: Rollout) -> None:
        await asyncio.sleep(2.0)
        rollout.turns = [await ask(policy, [1], "a"), await ask(policy, [2], "b")]

    for rollout in (await stage_of(play).group(slow, size=2)).rollouts:
        assert rollout.metrics["env_seconds"] == pytest.approx(2.0)


async def test_numpy_numbers_are_stored_as_plain_ones() -> None:
    async def play(policy: RolloutPolicy, rollout: Rollout) -> None:
        turn = await ask(policy, [1], "a")
        rewards: Any = {"won": np.float32(0.5)}
        rollout.turns = [replace(turn, rewards=rewards, token_advantages=np.array([1.0, 2.0], np.float32))]
        moves: Any = np.int64(3)
        rollout.metrics["moves"] = moves

    group = await stage_of(play).group(Generator(), size=2)
    for rollout in group.rollouts:
        assert rollout.status is RolloutStatus.COMPLETED
        encode(group_record(Assigned(0, "task", 0), group))
        assert (rollout.metrics["moves"], rollout.turns[0].rewards) == (3.0, {"won": 0.5})


async def test_non_numeric_metric_is_an_environment_error() -> None:
    async def play(policy: RolloutPolicy, rollout: Rollout) -> None:
        moves: Any = "three"
        rollout.metrics["moves"] = moves

    (rollout,) = (await stage_of(play).group(Generator())).rollouts
    assert rollout.status is RolloutStatus.ERROR_ENV
    assert "play filled in metrics with 'moves': 'three'; it must map names to numbers" in str(rollout.error)


async def test_agent_is_notified_when_time_is_up_and_keeps_its_turns() -> None:
    async def until_time_is_up(policy: RolloutPolicy, rollout: Rollout) -> None:
        with policy.waiting():
            await asyncio.sleep(100.0)
        rollout.turns.append(await ask(policy, [1], "a"))
        await policy.time_is_up.wait()
        rollout.status = RolloutStatus.TRUNCATED_TIME

    (rollout,) = (await stage_of(until_time_is_up).group(Generator())).rollouts
    assert (rollout.status, len(rollout.turns)) == (RolloutStatus.TRUNCATED_TIME, 1)
    assert rollout.metrics["own_seconds"] == pytest.approx(30.0, abs=0.1)
    assert rollout.metrics["seconds"] == pytest.approx(130.0, abs=0.1)


@pytest.mark.parametrize(("turns", "status"), [(1, RolloutStatus.TRUNCATED_TIME), (0, RolloutStatus.ERROR_TIMEOUT)])
async def test_agent_that_ignores_the_time_limit_is_cancelled(turns: int, status: RolloutStatus) -> None:
    async def endless(policy: RolloutPolicy, rollout: Rollout) -> None:
        for number in range(turns):
            rollout.turns.append(await ask(policy, [1], str(number)))
        await asyncio.Event().wait()

    stage = stage_of(endless)
    (rollout,) = (await stage.group(Generator())).rollouts
    assert rollout.status is status
    assert rollout.error == "its own time is up: rollout_timeout_s is 30"
    assert rollout.metrics["seconds"] == pytest.approx(35.0, abs=0.1)
    assert stage.all_released()


async def test_agent_error_fails_only_its_rollout() -> None:
    async def raises(policy: RolloutPolicy, rollout: Rollout) -> None:
        if rollout.sibling == 0:
            raise KeyError("answer")
        await two_at_once(policy, rollout)

    one, other = (await stage_of(raises).group(Generator(), size=2)).rollouts
    assert (one.status, one.error) == (RolloutStatus.ERROR_ENV, "KeyError: 'answer'")
    assert other.status is RolloutStatus.COMPLETED

    async def no_turn(policy: RolloutPolicy, rollout: Rollout) -> None:
        rollout.turns.append("said")  # pyright: ignore[reportArgumentType]

    (rollout,) = (await stage_of(no_turn).group(Generator())).rollouts
    assert (rollout.status, rollout.error) == (
        RolloutStatus.ERROR_ENV, "TypeError: play added a turn of type str; it must be a Turn",
    )  # fmt: skip


async def test_completion_has_its_own_time_limit() -> None:
    async def hangs(*args: Any, **kwargs: Any) -> Completion:
        return await asyncio.Future()

    async def tries_twice(policy: RolloutPolicy, rollout: Rollout) -> None:
        with suppress(TimeoutError):
            await ask(policy, [1], "a")
        rollout.error = "gave up"

    limits = RolloutConfig(rollout_timeout_s=30.0, generate_timeout_s=3.0)
    (rollout,) = (await stage_of(tries_twice, limits=limits).group(hangs)).rollouts
    assert (rollout.status, rollout.error) == (RolloutStatus.COMPLETED, "gave up")
    assert rollout.metrics["seconds"] == pytest.approx(3.0)


async def test_cancelled_group_closes_the_agent() -> None:
    begun = asyncio.Event()

    async def endless(policy: RolloutPolicy, rollout: Rollout) -> None:
        begun.set()
        await asyncio.Event().wait()

    stage = stage_of(endless)
    running = asyncio.create_task(stage.group(Generator()))
    await begun.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert stage.all_released()


@pytest.mark.looptime(False)
async def test_agent_cannot_run_in_a_thread() -> None:
    limits = LIMITS.model_copy(update={"env_in_thread": True})
    (rollout,) = (await stage_of(two_at_once, limits=limits).group(Generator())).rollouts
    assert rollout.status is RolloutStatus.ERROR_ENV
    assert "set rollout.env_in_thread = false" in (rollout.error or "")

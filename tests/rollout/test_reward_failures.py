"""Rewards that fail, hang or are cancelled: effects on the call, the group and the run. Virtual time."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from titan_rl import Completion, FinishReason, SamplingParams, TokenObservation, TokenStep, VersionSpan
from titan_rl.core.errors import RewardError, TrainingError
from titan_rl.rollout.group.rollouter import Rollouter
from titan_rl.rollout.rewards.reward import FailurePolicy, GroupReward, Reward
from titan_rl.rollout.rewards.rubric import Rubric
from titan_rl.rollout.settings import RolloutConfig
from titan_rl.rollout.types import Rollout, RolloutGroup, RolloutStatus
from titan_rl.scheduling.filters import too_few_siblings
from titan_rl.scheduling.lease import Lease
from titan_rl.scheduling.scheduler import GroupScheduler
from titan_rl.scheduling.settings import SchedulingConfig
from titan_rl.training.data.sample_builder import build_samples

pytestmark = pytest.mark.looptime


class Env:
    """Environment of one turn, which ends with the sibling's status in `statuses`."""

    def __init__(self, statuses: Sequence[RolloutStatus] = ()) -> None:
        self._statuses = statuses
        self.closed = 0

    async def reset(self) -> TokenObservation:
        return TokenObservation([1, 2])

    async def step(self, completion: Completion) -> TokenStep:
        sibling = int(completion.request_id.split("/")[1])
        return TokenStep(status=self._statuses[sibling] if self._statuses else RolloutStatus.COMPLETED)

    async def close(self) -> None:
        self.closed += 1


async def generate(prompt_token_ids: Sequence[int], *, request_id: str, **_: Any) -> Completion:
    return Completion(request_id, [5], [-0.5], FinishReason.STOP, (VersionSpan(0, 1),))


async def slow_second(prompt_token_ids: Sequence[int], *, request_id: str, **_: Any) -> Completion:
    """Sibling 1 takes a day."""
    if request_id.startswith("g/1/"):
        await asyncio.sleep(86_400.0)
    return await generate(prompt_token_ids, request_id=request_id)


async def play(rubric: Rubric, env: Callable[[], Env] = Env, generate: Any = generate, size: int = 2) -> RolloutGroup:
    rollouter = Rollouter(lambda _: env(), rubric, max_context=64)
    return await rollouter.run_group(
        generate, None, group_id="g", group_size=size, sampling=SamplingParams(max_tokens=4)
    )


def now() -> float:
    return asyncio.get_running_loop().time()


class Flaky:
    """A judge whose first calls fail."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.called_at: list[float] = []

    async def __call__(self, rollout: Rollout) -> float:
        self.called_at.append(now())
        if len(self.called_at) <= self.failures:
            raise ConnectionError("503")
        return 1.0 + rollout.sibling


async def test_failed_reward_call_is_retried_with_backoff() -> None:
    judge = Flaky(failures=3)
    group = await play(Rubric([Reward(judge, name="judge", on_failure=FailurePolicy(retries=3))]), size=1)
    assert judge.called_at == [0.0, 1.0, 3.0, 7.0]
    assert group.failure is None
    assert group.rollouts[0].reward == 1.0


async def test_only_the_failed_call_is_retried() -> None:
    judge = Flaky(failures=1)
    group = await play(Rubric([Reward(judge, name="judge")]), size=4)
    assert len(judge.called_at) == 5
    assert [rollout.reward for rollout in group.rollouts] == [1.0, 2.0, 3.0, 4.0]


async def test_group_is_dropped_with_the_reason_after_its_retries() -> None:
    judge = Flaky(failures=1000)
    policy = FailurePolicy(retries=1, backoff_s=10.0)
    group = await play(Rubric([Reward(judge, name="judge", on_failure=policy)]))
    assert now() == 10.0
    assert group.failure is not None
    assert "reward 'judge' failed on rollout 'g/0': ConnectionError: 503" in group.failure.error
    assert "test_reward_failures.py" in (group.failure.where or "")
    assert "raise ConnectionError" in group.failure.traceback
    assert [(r.status, r.reward, r.advantage) for r in group.rollouts] == [(RolloutStatus.COMPLETED, None, None)] * 2
    assert all("ConnectionError: 503" in (rollout.error or "") for rollout in group.rollouts)
    assert too_few_siblings(group) == "reward_failed"
    assert build_samples(group, 1.0) == []


async def test_sync_reward_is_not_retried() -> None:
    calls: list[str] = []

    def broken(rollout: Rollout) -> float:
        calls.append(rollout.rollout_id)
        return 1 / 0

    group = await play(Rubric([Reward(broken)]), size=1)
    assert calls == ["g/0"]
    assert group.failure is not None


async def test_failure_policy_can_end_the_run() -> None:
    policy = FailurePolicy(retries=0, then="fail_run")
    with pytest.raises(RewardError, match=r"reward 'judge' failed on rollout 'g/\d': ConnectionError: 503 \("):
        await play(Rubric([Reward(Flaky(1000), name="judge", on_failure=policy)]))


@pytest.mark.parametrize("then", ["drop_group", "fail_run"])
async def test_running_siblings_are_stopped_when_their_group_has_failed(then: Any) -> None:
    envs: list[Env] = []

    def env() -> Env:
        envs.append(Env())
        return envs[-1]

    rubric = Rubric([Reward(Flaky(1000), name="judge", on_failure=FailurePolicy(0, then=then))])
    if then == "fail_run":
        with pytest.raises(RewardError):
            await play(rubric, env, slow_second)
    else:
        group = await play(rubric, env, slow_second)
        assert [r.status for r in group.rollouts] == [RolloutStatus.COMPLETED, RolloutStatus.ABORTED]
        assert "stopped" in (group.rollouts[1].error or "")
        assert too_few_siblings(group) == "reward_failed"
    assert now() < 1.0
    assert [env.closed for env in envs] == [1, 1]


async def test_sibling_stopped_during_its_retry_is_reported_as_finished() -> None:
    class FailsOnce(Env):
        async def step(self, completion: Completion) -> TokenStep:
            if completion.request_id == "g/1/0":
                raise ConnectionError("once")
            return await super().step(completion)

    async def slow_again(prompt_token_ids: Sequence[int], *, request_id: str, **_: Any) -> Completion:
        if request_id.startswith("g/1~1/"):
            await asyncio.sleep(86_400.0)
        return await generate(prompt_token_ids, request_id=request_id)

    async def judge(rollout: Rollout) -> float:
        await asyncio.sleep(5.0)
        raise ConnectionError("503")

    finished: list[tuple[str, RolloutStatus]] = []
    rubric = Rubric([Reward(judge, on_failure=FailurePolicy(0))])
    rollouter = Rollouter(lambda _: FailsOnce(), rubric, max_context=64, limits=RolloutConfig(max_retries=1))
    group = await rollouter.run_group(
        slow_again,
        None,
        group_id="g",
        group_size=2,
        sampling=SamplingParams(max_tokens=4),
        on_finished=lambda rollout: finished.append((rollout.rollout_id, rollout.status)),
    )
    assert finished == [("g/0", RolloutStatus.COMPLETED), ("g/1~1", RolloutStatus.ABORTED)]
    assert [rollout.rollout_id for rollout in group.rollouts] == ["g/0", "g/1~1"]


async def test_stopped_sibling_keeps_its_turns() -> None:
    class TwoTurns(Env):
        async def step(self, completion: Completion) -> TokenStep:
            if completion.request_id == "g/1/0":
                return TokenStep([1, 2, *completion.token_ids, 7])
            return TokenStep(status=RolloutStatus.COMPLETED)

    async def slow_second_turn(prompt_token_ids: Sequence[int], *, request_id: str, **_: Any) -> Completion:
        if request_id == "g/1/1":
            await asyncio.sleep(86_400.0)
        return await generate(prompt_token_ids, request_id=request_id)

    async def judge(rollout: Rollout) -> float:
        await asyncio.sleep(5.0)
        raise ConnectionError("503")

    group = await play(Rubric([Reward(judge, on_failure=FailurePolicy(0))]), TwoTurns, slow_second_turn)
    assert [(r.status, len(r.turns)) for r in group.rollouts] == [("completed", 1), ("aborted", 1)]


async def test_failing_group_reward_drops_its_group() -> None:
    def rank(rollouts: Sequence[Rollout]) -> list[float]:
        return [1.0]

    group = await play(Rubric([GroupReward(rank)]))
    assert group.failure is not None
    assert "reward 'rank' returned 1 values for the 2 rollouts of group 'g'" in group.failure.error


async def test_hanging_judge_is_ended_at_its_time_limit() -> None:
    async def judge(rollout: Rollout) -> float:
        await asyncio.Event().wait()
        return 1.0

    group = await play(Rubric([Reward(judge, timeout_s=20.0)], timeout_s=300.0))
    assert now() == 20.0
    assert group.failure is not None
    assert "reward 'judge' took longer than 20 s on rollout 'g/" in group.failure.error
    assert re.fullmatch(r"tests/rollout/test_reward_failures.py:\d+ in judge", group.failure.where or "")


async def test_judge_that_ignores_cancellation_is_abandoned() -> None:
    never = asyncio.Event()

    async def stubborn(rollout: Rollout) -> float:
        while True:
            try:
                await never.wait()
            except asyncio.CancelledError:
                continue
            return 0.0

    playing = asyncio.ensure_future(play(Rubric([Reward(stubborn, timeout_s=20.0)])))
    await asyncio.wait({playing}, timeout=60.0)
    assert playing.done()
    assert now() == 25.0
    never.set()
    await asyncio.sleep(1.0)


async def cancels_its_own(rollout: Rollout) -> float:
    call = asyncio.ensure_future(asyncio.sleep(1e6))
    call.cancel()
    await call
    return 1.0


async def cancels_its_own_group(rollouts: Sequence[Rollout]) -> list[float]:
    return [await cancels_its_own(rollouts[0])]


class Own:
    """Custom `WeightedReward`."""

    name, weight = "own", 1.0
    on_failure = FailurePolicy(retries=0)

    def __init__(self, give: Callable[[Sequence[Rollout]], Any]) -> None:
        self._give = give

    async def values(self, rollouts: Sequence[Rollout]) -> list[float]:
        return self._give(rollouts)


def stray(rollouts: Sequence[Rollout]) -> list[float]:
    raise asyncio.CancelledError


def raises(rollouts: Sequence[Rollout]) -> list[float]:
    raise KeyError("answer")


async def ends_the_process(rollout: Rollout) -> float:
    raise SystemExit(3)


def ends_the_process_at_once(rollout: Rollout) -> float:
    raise SystemExit(3)


class NoNumber:
    """Value whose methods raise, like those of a tensor without data."""

    def __float__(self) -> float:
        raise RuntimeError("it has no data")

    def __repr__(self) -> str:
        raise RuntimeError("nor a text")

    def __iter__(self) -> Any:
        raise RuntimeError("nor items")


class PanicException(BaseException):
    """Like the exception of extensions written in Rust."""


async def panics(rollout: Rollout) -> float:
    raise PanicException("index out of bounds")


async def ends_its_generator(rollout: Rollout) -> float:
    raise GeneratorExit("over")


def ends_its_generator_at_once(rollout: Rollout) -> float:
    raise GeneratorExit("over")


once = FailurePolicy(retries=0)


@pytest.mark.parametrize(
    ("reward", "says"),
    [
        (Reward(cancels_its_own, on_failure=once), "reward 'cancels_its_own' .* was cancelled, although nobody"),
        (GroupReward(cancels_its_own_group, on_failure=once), "was cancelled, although nobody requested"),
        (Own(stray), "reward 'own' on group 'g' was cancelled, although nobody requested"),
        (Own(raises), "reward 'own' failed on group 'g': KeyError: 'answer'"),
        (Own(lambda rollouts: [1.0]), "reward 'own' returned 1 values for the 2 rollouts of group 'g'"),
        (Own(lambda rollouts: [1.0, float("nan")]), "reward 'own' returned nan for group 'g'; it must be finite"),
        (Own(lambda rollouts: None), "reward 'own' returned None for group 'g'; it must return a sequence"),
        (Own(lambda rollouts: {1.0, 0.5}), r"returned {.*} for group 'g'; it must return a sequence"),
        (Own(lambda rollouts: dict(enumerate("ab"))), "returned {0: 'a', 1: 'b'} for group 'g'; it must return a seq"),
        (Reward(ends_the_process, on_failure=once), "failed on rollout 'g/.': RuntimeError: SystemExit: 3"),
        (
            Reward(lambda _: NoNumber(), name="odd"),
            "reward 'odd' returned <NoNumber, .* for rollout 'g/.'; it must return a num",
        ),
        (Own(lambda _: NoNumber()), "reward 'own' returned <NoNumber, .* for group 'g'; it must return a sequence"),
        (Reward(panics, on_failure=once), "failed on rollout 'g/.': RuntimeError: PanicException: index out of bounds"),
        (Reward(ends_its_generator, on_failure=once), "failed on rollout 'g/.': RuntimeError: GeneratorExit: over"),
        (Reward(ends_its_generator_at_once), "failed on rollout 'g/.': GeneratorExit: over"),
        (Reward(ends_the_process_at_once), "failed on rollout 'g/.': SystemExit: 3"),
    ],
    ids=lambda value: getattr(value, "name", None),
)
async def test_reward_failure_names_the_reward(reward: Any, says: str) -> None:
    playing = asyncio.ensure_future(play(Rubric([reward])))
    await asyncio.wait({playing}, timeout=60.0)
    group = playing.result()
    assert group.failure is not None
    assert re.search(says, group.failure.error)
    if "cancels_its_own" in group.failure.error:
        assert re.fullmatch(r"tests/rollout/test_reward_failures.py:\d+ in cancels_its_own", group.failure.where or "")


async def test_cancelled_group_ends_its_retries() -> None:
    judge = Flaky(failures=1000)
    playing = asyncio.ensure_future(play(Rubric([Reward(judge, name="judge")]), size=1))
    await asyncio.sleep(2.0)
    playing.cancel()
    await asyncio.wait({playing}, timeout=60.0)
    assert playing.cancelled()
    assert judge.called_at == [0.0, 1.0]


class Run:
    """Scheduler of one group per step over a real rollouter."""

    def __init__(self, rubric: Rubric, env: Callable[[], Env] = Env, **settings: Any) -> None:
        rollouter = Rollouter(lambda _: env(), rubric, max_context=64)
        self.version = 0

        async def newest(prompt_token_ids: Sequence[int], *, request_id: str, **_: Any) -> Completion:
            return Completion(request_id, [5], [-0.5], FinishReason.STOP, (VersionSpan(self.version, 1),))

        async def run_group(lease: Lease) -> RolloutGroup:
            return await rollouter.run_group(
                newest,
                None,
                group_id=f"{lease.index}",
                group_size=2,
                sampling=SamplingParams(max_tokens=4),
                on_finished=lease.rollout_finished,
            )

        knobs = {"groups_per_step": 1, "max_staleness": 1, "max_refills": 100} | settings
        self.scheduler = GroupScheduler(run_group, SchedulingConfig(**knobs), group_size=2, budget=8)

    async def trained(self, steps: int) -> list[str]:
        """Return the ids of the groups of the next `steps` steps."""
        running = asyncio.ensure_future(self.scheduler.run())
        groups: list[str] = []
        try:
            async with asyncio.timeout(1000.0):
                for _ in range(steps):
                    batch = await self.scheduler.next_batch()
                    groups += [group.group_id for group in batch.groups]
                    self.version = batch.version + 1
                    batch.release()
        finally:
            running.cancel()
            await asyncio.wait({running})
        return groups


async def test_run_continues_without_groups_whose_judge_failed() -> None:
    async def judge(rollout: Rollout) -> float:
        if rollout.group_id in ("1", "2"):
            return await cancels_its_own(rollout)
        return float(rollout.sibling)

    assert await Run(Rubric([Reward(judge, on_failure=once)])).trained(3) == ["0", "3", "4"]


async def test_reward_that_always_fails_ends_the_run_with_its_line() -> None:
    def broken(rollout: Rollout) -> float:
        raise KeyError("answer")

    with pytest.raises(TrainingError, match=r"'broken' failed on .*KeyError: 'answer' \(.*test_reward_fail.*:\d"):
        await Run(Rubric([Reward(broken)]), max_failed_groups=3).trained(1)
    assert now() < 1.0


def unparsed() -> Env:
    return Env([RolloutStatus.ERROR_PARSE, RolloutStatus.COMPLETED])


async def test_unparsable_answer_has_an_advantage_and_is_trained_on() -> None:
    group = await play(Rubric([Reward(lambda _: 1.0, name="one")], error_reward=0.0), unparsed)
    assert [rollout.reward for rollout in group.rollouts] == [0.0, 1.0]
    assert [rollout.advantage for rollout in group.rollouts] == pytest.approx([-1.0, 1.0], abs=1e-3)
    samples = build_samples(group, 1.0)
    assert [sample.rollout_id for sample in samples] == ["g/0", "g/1"]
    assert samples[0].advantages[-1] == pytest.approx(-1.0, abs=1e-3)


@pytest.mark.parametrize("status", [RolloutStatus.ERROR_ENV, RolloutStatus.ERROR_TIMEOUT, RolloutStatus.ERROR_GENERATE])
async def test_faulty_rollout_has_no_advantage_and_is_not_trained_on(status: RolloutStatus) -> None:
    rubric = Rubric([Reward(lambda _: 1.0, name="one")], error_reward=0.0)
    group = await play(rubric, lambda: Env([status, RolloutStatus.COMPLETED, RolloutStatus.COMPLETED]), size=3)
    assert [rollout.advantage for rollout in group.rollouts] == [None, 0.0, 0.0]
    assert [sample.rollout_id for sample in build_samples(group, 1.0)] == ["g/1", "g/2"]


@pytest.mark.parametrize(
    ("status", "error_reward", "reason"),
    [("error_parse", None, "too_few_siblings"), ("error_parse", 0.0, None), ("error_env", 0.0, "failed")],
)
async def test_group_of_unparsable_answers_does_not_count_as_failed(
    status: str, error_reward: float | None, reason: str | None
) -> None:
    rubric = Rubric([Reward(lambda _: 1.0, name="one")], error_reward=error_reward)
    group = await play(rubric, lambda: Env([RolloutStatus(status)] * 2))
    assert too_few_siblings(group) == reason


async def test_unparsable_answers_with_an_error_reward_do_not_end_the_run() -> None:
    rubric = Rubric([Reward(lambda _: 1.0, name="one")], error_reward=0.0)
    run = Run(rubric, lambda: Env([RolloutStatus.ERROR_PARSE] * 2), max_failed_groups=2)
    assert await run.trained(4) == ["0", "1", "2", "3"]


async def test_unparsable_answers_without_an_error_reward_end_the_run_with_the_fix() -> None:
    run = Run(Rubric([Reward(lambda _: 1.0, name="one")]), lambda: Env([RolloutStatus.ERROR_PARSE] * 2), max_refills=2)
    says = "too_few_siblings .*; 8 of their rollouts have an answer that could not be parsed.* an error_reward[^;]*$"
    with pytest.raises(TrainingError, match=says):
        await run.trained(1)

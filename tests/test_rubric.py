"""Rubrics: the weighted mean, what is refused, and whose fault a failure is."""

import asyncio
import time
from collections.abc import Sequence

import pytest

from titan_rl.errors import RewardError
from titan_rl.rollout.types import Rollout, RolloutGroup, RolloutStatus, Turn
from titan_rl.rubric import GroupReward, Reward, Rubric, env_reward
from titan_rl.types import Completion, FinishReason


def rollout(sibling: int = 0, status: RolloutStatus = RolloutStatus.COMPLETED) -> Rollout:
    return Rollout(f"g/{sibling}", "g", sibling, sample=None, status=status)


def half(rollout: Rollout) -> float:
    return 0.5


async def sibling_number(rollout: Rollout) -> float:
    await asyncio.sleep(0)
    return float(rollout.sibling)


def rank(rollouts: Sequence[Rollout]) -> list[float]:
    return [float(-i) for i in range(len(rollouts))]


async def test_reward_is_the_weighted_mean_and_the_breakdown_is_unweighted() -> None:
    group = RolloutGroup("g", None, [rollout(0), rollout(1), rollout(2)])
    await Rubric([Reward(half, 2.0), Reward(sibling_number), GroupReward(rank, 0.0)]).score(group)
    assert [r.reward for r in group.rollouts] == pytest.approx([1 / 3, 2 / 3, 1.0])
    assert group.rollouts[2].reward_breakdown == {"half": 0.5, "sibling_number": 2.0, "rank": -2.0}


async def test_async_group_reward_booleans_and_callable_objects() -> None:
    class Judge:
        async def __call__(self, rollouts: Sequence[Rollout]) -> tuple[bool, ...]:
            return tuple(r.sibling > 0 for r in rollouts)

    rollouts = [rollout(0), rollout(1)]
    await Rubric([GroupReward(Judge())]).score(rollouts)
    assert [r.reward_breakdown for r in rollouts] == [{"Judge": 0.0}, {"Judge": 1.0}]


def test_duplicate_names_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\['half'\] appear more than once"):
        Rubric([Reward(half), Reward(half)])
    Rubric([Reward(half), Reward(half, name="other")])


@pytest.mark.parametrize("rewards", [[], [Reward(half, 0.0)], [Reward(half, 1.0), Reward(sibling_number, -1.0)]])
def test_weights_that_do_not_sum_to_more_than_zero_are_refused(rewards: list[Reward]) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        Rubric(rewards)


def test_bad_numbers_are_refused_at_construction() -> None:
    with pytest.raises(ValueError, match="weight nan"):
        Reward(half, float("nan"))
    with pytest.raises(ValueError, match="error_reward is inf"):
        Rubric([Reward(half)], error_reward=float("inf"))
    with pytest.raises(ValueError, match="timeout_s is 0"):
        Rubric([Reward(half)], timeout_s=0)


async def test_truncated_and_errored_rollouts_have_rewards_of_their_own() -> None:
    statuses = [RolloutStatus.COMPLETED, RolloutStatus.TRUNCATED_TURNS, RolloutStatus.ERROR_ENV, RolloutStatus.ABORTED]
    rollouts = [rollout(i, status) for i, status in enumerate(statuses)]
    seen: list[int] = []

    def note(rollouts: Sequence[Rollout]) -> list[float]:
        seen.extend(r.sibling for r in rollouts)
        return [1.0] * len(rollouts)

    await Rubric([GroupReward(note)], truncated_reward=-0.5, error_reward=-1.0).score(rollouts)
    assert [r.reward for r in rollouts] == [1.0, -0.5, -1.0, None]
    assert [r.reward_breakdown for r in rollouts] == [{"note": 1.0}, {}, {}, {}]
    assert seen == [0]


async def test_by_default_truncated_rollouts_are_judged_and_errored_ones_stay_out() -> None:
    rollouts = [rollout(0, RolloutStatus.TRUNCATED_LENGTH), rollout(1, RolloutStatus.ERROR_PARSE)]
    await Rubric([Reward(half)]).score(rollouts)
    assert [r.reward for r in rollouts] == [0.5, None]


def divide(rollout: Rollout) -> float:
    return 1 / (1 - rollout.sibling)


async def divide_async(rollout: Rollout) -> float:
    await asyncio.sleep(0)
    return divide(rollout)


def exhausted(rollout: Rollout) -> float:
    return next(iter(()))


@pytest.mark.parametrize(
    ("reward", "name", "cause"),
    [
        (Reward(divide), "divide", ZeroDivisionError),
        (Reward(divide, in_thread=True), "divide", ZeroDivisionError),
        (Reward(divide_async), "divide_async", ZeroDivisionError),
        (Reward(exhausted), "exhausted", StopIteration),
        (Reward(exhausted, in_thread=True), "exhausted", StopIteration),
    ],
)
async def test_a_raising_function_is_attributed_and_nothing_is_scored(
    reward: Reward, name: str, cause: type[Exception]
) -> None:
    rollouts = [rollout(1), rollout(1)]
    with pytest.raises(RewardError, match=f"'{name}' failed on rollout 'g/1': {cause.__name__}") as caught:
        await Rubric([Reward(half), reward]).score(rollouts)
    assert isinstance(caught.value.__cause__, cause)
    assert all(r.reward is None and not r.reward_breakdown for r in rollouts)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, "0.5", [1.0]])
async def test_a_value_that_is_no_finite_number_is_an_error(value: object) -> None:
    with pytest.raises(RewardError, match=r"reward 'odd' gave .* for rollout 'g/0'"):
        await Rubric([Reward(lambda _: value, name="odd")]).score([rollout()])  # pyright: ignore


@pytest.mark.parametrize("given", [[1.0], [1.0, float("nan")], 1.0, None])
async def test_a_group_reward_gives_one_finite_value_per_rollout(given: object) -> None:
    with pytest.raises(RewardError, match="reward 'odd' gave"):
        await Rubric([GroupReward(lambda _: given, name="odd")]).score([rollout(0), rollout(1)])  # pyright: ignore


async def test_a_judge_that_never_answers_is_an_error_with_its_name() -> None:
    async def judge(rollout: Rollout) -> float:
        await asyncio.Event().wait()
        return 1.0

    with pytest.raises(
        RewardError, match=r"reward 'judge' took longer than 0.01 s on rollout 'g/0'; raise its timeout_s"
    ):
        await Rubric([Reward(half), Reward(judge)], timeout_s=0.01).score([rollout()])


async def test_in_thread_leaves_the_loop_free() -> None:
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)

    def slow(rollout: Rollout) -> float:
        before = ticks
        deadline = time.monotonic() + 10
        while ticks == before and time.monotonic() < deadline:
            time.sleep(0.001)
        return float(ticks > before)

    ticker = asyncio.ensure_future(tick())
    one = rollout()
    await Rubric([Reward(slow, in_thread=True)]).score([one])
    ticker.cancel()
    assert one.reward == 1.0


async def test_env_reward_sums_the_turns_and_names_what_exists() -> None:
    completion = Completion("r", [], [], FinishReason.STOP, ())
    played = rollout()
    played.turns = [Turn([1], completion, {"exact": 0.25}), Turn([1], completion, {"exact": 0.5, "length": 3.0})]
    await Rubric([env_reward("exact")]).score([played])
    assert played.reward_breakdown == {"exact": 0.75}
    with pytest.raises(RewardError, match=r"gave no reward 'exakt', only \['exact', 'length'\]"):
        await Rubric([env_reward("exakt")]).score([played])

"""Rubrics: combination of rewards, validation, and attribution of failures."""

import asyncio
import pickle
import time
from collections.abc import Sequence
from typing import Any

import pytest
from background import HANG_S
from stage import Generator, Stage

from titan_rl.core.errors import RewardError
from titan_rl.rollout.rewards.reward import FailurePolicy, GroupReward, Reward, env_reward
from titan_rl.rollout.rewards.rubric import Rubric
from titan_rl.rollout.types import Rollout, RolloutGroup, RolloutStatus, Turn
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


async def test_combine_sum_allows_negative_weights() -> None:
    rollouts = [rollout(0), rollout(3)]
    rubric = Rubric([Reward(half, 2.0), Reward(sibling_number, -1.0)], combine="sum")
    await rubric.score(rollouts)
    assert [r.reward for r in rollouts] == [1.0, -2.0]
    assert rollouts[1].reward_breakdown == {"half": 0.5, "sibling_number": 3.0}
    assert (rubric.combine, Rubric([Reward(half)]).combine) == ("sum", "mean")


def test_unknown_combine_and_zero_weights_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"combine is 'avg'; it must be 'mean' or 'sum'"):
        Rubric([Reward(half)], combine="avg")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"are all 0"):
        Rubric([Reward(half, 0.0)], combine="sum")
    Rubric([Reward(half, 1.0), Reward(sibling_number, -1.0)], combine="sum")


async def test_group_reward_accepts_async_objects_and_booleans() -> None:
    class Judge:
        async def __call__(self, rollouts: Sequence[Rollout]) -> tuple[bool, ...]:
            return tuple(r.sibling > 0 for r in rollouts)

    rollouts = [rollout(0), rollout(1)]
    await Rubric([GroupReward(Judge())]).score(rollouts)
    assert [r.reward_breakdown for r in rollouts] == [{"Judge": 0.0}, {"Judge": 1.0}]


def test_duplicate_names_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"\['half'\] appear more than once"):
        Rubric([Reward(half), Reward(half)])
    Rubric([Reward(half), Reward(half, name="other")])


def test_rubric_without_rewards_is_rejected() -> None:
    with pytest.raises(ValueError, match="has no rewards; give it at least one"):
        Rubric([])


@pytest.mark.parametrize("rewards", [[Reward(half, 0.0)], [Reward(half, 1.0), Reward(sibling_number, -1.0)]])
def test_weights_with_a_nonpositive_sum_are_rejected(rewards: list[Reward]) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        Rubric(rewards)


def test_invalid_numbers_are_rejected_at_construction() -> None:
    with pytest.raises(ValueError, match="weight nan"):
        Reward(half, float("nan"))
    with pytest.raises(ValueError, match="error_reward is inf"):
        Rubric([Reward(half)], error_reward=float("inf"))
    with pytest.raises(ValueError, match="timeout_s is 0"):
        Rubric([Reward(half)], timeout_s=0)


async def test_truncated_and_errored_rollouts_get_fixed_rewards() -> None:
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


async def test_truncated_rollouts_are_judged_by_default_and_errored_ones_are_not() -> None:
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
        (Reward(divide, in_thread=True, on_failure=FailurePolicy(0)), "divide", ZeroDivisionError),
        (Reward(divide_async, on_failure=FailurePolicy(0)), "divide_async", ZeroDivisionError),
        (Reward(exhausted), "exhausted", StopIteration),
        (Reward(exhausted, in_thread=True, on_failure=FailurePolicy(0)), "exhausted", StopIteration),
    ],
)
async def test_reward_error_names_its_function_and_scores_nothing(
    reward: Reward, name: str, cause: type[Exception]
) -> None:
    rollouts = [rollout(1), rollout(1)]
    with pytest.raises(RewardError, match=f"'{name}' failed on rollout 'g/1': {cause.__name__}") as caught:
        await Rubric([Reward(half), reward]).score(rollouts)
    assert isinstance(caught.value.__cause__, cause)
    assert all(r.reward is None and not r.reward_breakdown for r in rollouts)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, "0.5", [1.0]])
async def test_reward_that_is_not_a_finite_number_is_an_error(value: object) -> None:
    with pytest.raises(RewardError, match=r"reward 'odd' returned .* for rollout 'g/0'"):
        await Rubric([Reward(lambda _: value, name="odd")]).score([rollout()])  # pyright: ignore


@pytest.mark.parametrize("given", [[1.0], [1.0, float("nan")], 1.0, None])
async def test_group_reward_must_give_one_finite_value_per_rollout(given: object) -> None:
    with pytest.raises(RewardError, match="reward 'odd' returned"):
        await Rubric([GroupReward(lambda _: given, name="odd")]).score([rollout(0), rollout(1)])  # pyright: ignore


async def test_error_about_a_hanging_judge_names_it() -> None:
    async def judge(rollout: Rollout) -> float:
        await asyncio.Event().wait()
        return 1.0

    with pytest.raises(
        RewardError, match=r"reward 'judge' took longer than 0.01 s on rollout 'g/0'; raise its timeout_s"
    ):
        await Rubric([Reward(half), Reward(judge)], timeout_s=0.01).score([rollout()])


async def test_reward_in_a_thread_does_not_block_the_event_loop() -> None:
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)

    def slow(rollout: Rollout) -> float:
        before = ticks
        deadline = time.monotonic() + HANG_S
        while ticks == before and time.monotonic() < deadline:
            time.sleep(0.001)
        return float(ticks > before)

    ticker = asyncio.ensure_future(tick())
    one = rollout()
    await Rubric([Reward(slow, in_thread=True)]).score([one])
    ticker.cancel()
    assert one.reward == 1.0


async def test_env_reward_sums_turns_and_lists_existing_names() -> None:
    completion = Completion("r", [], [], FinishReason.STOP, ())
    played = rollout()
    played.turns = [Turn([1], completion, {"exact": 0.25}), Turn([1], completion, {"exact": 0.5, "length": 3.0})]
    await Rubric([env_reward("exact")]).score([played])
    assert played.reward_breakdown == {"exact": 0.75}
    with pytest.raises(RewardError, match=r"gave no reward 'exakt', only \['exact', 'length'\]"):
        await Rubric([env_reward("exakt")]).score([played])


async def test_rewards_begun_early_are_not_computed_again() -> None:
    calls: list[str] = []

    def note(rollout: Rollout) -> float:
        calls.append(rollout.rollout_id)
        return 1.0

    rubric = Rubric([Reward(note), GroupReward(rank)])
    rollouts = [rollout(0), rollout(1)]
    begun = {one.rollout_id: await rubric.begin(one) for one in rollouts}
    assert begun == {"g/0": {"note": 1.0}, "g/1": {"note": 1.0}}
    assert [one.reward_breakdown for one in rollouts] == [{}, {}]
    await rubric.score(rollouts, begun)
    assert calls == ["g/0", "g/1"]
    assert [one.reward_breakdown for one in rollouts] == [{"note": 1.0, "rank": 0.0}, {"note": 1.0, "rank": -1.0}]


async def test_rescoring_replaces_the_rewards_of_another_rubric() -> None:
    rollouts = [rollout(0), rollout(1)]
    await Rubric([Reward(half, name="quality"), Reward(half, name="format")]).score(rollouts)
    await Rubric([Reward(sibling_number, name="quality")]).score(rollouts)
    assert [one.reward for one in rollouts] == [0.0, 1.0]
    assert [one.reward_breakdown for one in rollouts] == [{"quality": 0.0}, {"quality": 1.0}]


async def test_reward_cannot_modify_the_rollout() -> None:
    seen: list[tuple[int, str, RolloutStatus]] = []

    def spoils(rollout: Rollout) -> float:
        rollout.turns.clear()
        rollout.messages[0]["content"] = "changed"  # pyright: ignore[reportIndexIssue]
        rollout.messages.append({"role": "user", "content": "more"})
        rollout.status = RolloutStatus.ERROR_ENV
        rollout.metrics["judge"] = 1.0
        rollout.reward_breakdown["spoils"] = 9.0
        return 1.0

    def looks(rollouts: Sequence[Rollout]) -> list[float]:
        seen.extend((len(one.turns), one.messages[0]["content"], one.status) for one in rollouts)
        return [0.0] * len(rollouts)

    played = rollout()
    played.turns = [Turn([1], Completion("r", [], [], FinishReason.STOP, ()))]
    played.messages = [{"role": "user", "content": "as it was"}]
    await Rubric([Reward(spoils), GroupReward(looks)]).score([played])
    await Rubric([GroupReward(looks)]).score([played])
    assert seen == [(1, "as it was", RolloutStatus.COMPLETED)] * 2
    assert played.status is RolloutStatus.COMPLETED
    assert played.messages == [{"role": "user", "content": "as it was"}]
    assert played.metrics == {}


def test_reward_error_can_be_pickled() -> None:
    error = RewardError("reward 'judge' failed", "task.py:3 in judge")
    error.ends_run = False
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.text, copy.ends_run) == (
        "reward 'judge' failed (task.py:3 in judge)",
        "reward 'judge' failed",
        False,
    )


@pytest.mark.parametrize(
    ("field", "value"), [("retries", -1), ("backoff_s", float("nan")), ("backoff_s", -1.0), ("then", "ignore")]
)
def test_invalid_failure_policy_is_rejected(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"FailurePolicy {field} is {value!r}; it must be"):
        FailurePolicy(**{field: value})  # pyright: ignore[reportArgumentType]


async def test_failing_reward_leaves_earlier_scores_unchanged() -> None:
    rollouts = [rollout(0), rollout(1)]
    await Rubric([Reward(half)]).score(rollouts)
    with pytest.raises(RewardError):
        await Rubric([Reward(sibling_number), Reward(divide)]).score(rollouts)
    assert [one.reward_breakdown for one in rollouts] == [{"half": 0.5}] * 2


class Heavy:
    name = "heavy"

    def __init__(self, weight: Any) -> None:
        self.weight = weight

    async def values(self, rollouts: Sequence[Rollout]) -> list[float]:
        return [1.0] * len(rollouts)


@pytest.mark.parametrize("weight", [float("nan"), float("inf"), "heavy", None])
def test_non_finite_weight_of_a_custom_reward_is_rejected(weight: object) -> None:
    with pytest.raises(ValueError, match="must be positive and finite"):
        Rubric([Reward(half), Heavy(weight)])


async def test_error_about_overflowing_rewards_lists_their_values() -> None:
    large = GroupReward(lambda rollouts: [1e308] * len(rollouts), name="large")
    with pytest.raises(RewardError, match=r"'large': 1e\+308.* too large to add up") as caught:
        await Rubric([large, Reward(lambda _: 1e308, name="other")]).score([rollout()])
    assert not caught.value.ends_run


@pytest.mark.parametrize("size", [1, 2])
async def test_reward_too_large_to_compare_fails_its_group(size: int) -> None:
    rubric = Rubric([Reward(lambda rollout: 1e300 if rollout.sibling == 0 else 0.0, name="huge")])
    group = await Stage(rubric=rubric).group(Generator(), size=size)
    assert group.failure is not None
    assert "'huge': 1e+300" in group.failure.error
    assert "must be between -1e+30 and 1e+30" in group.failure.error
    assert [rollout.reward for rollout in group.rollouts] == [None] * size


async def test_largest_allowed_rewards_are_compared() -> None:
    rubric = Rubric([Reward(lambda rollout: 1e30 if rollout.sibling else -1e30)])
    group = await Stage(rubric=rubric).group(Generator(), size=2)
    assert [rollout.advantage for rollout in group.rollouts] == [-1.0, 1.0]


async def test_plain_functions_are_accepted_as_rewards() -> None:
    rubric = Rubric([half, Reward(sibling_number, weight=3.0)])
    await rubric.score([one := rollout()])
    assert one.reward_breakdown == {"half": 0.5, "sibling_number": 0.0}
    assert one.reward == 0.125


def test_on_failure_must_be_a_failure_policy() -> None:
    class Weighted:
        name, weight, on_failure = "judge", 1.0, "drop"

        async def values(self, rollouts: Sequence[Rollout]) -> Sequence[float]:
            return [0.0 for _ in rollouts]

    with pytest.raises(ValueError, match="on_failure of reward 'judge' is 'drop'"):
        Rubric([Weighted()])
    with pytest.raises(ValueError, match=r"retries is 1\.5"):
        FailurePolicy(retries=1.5)  # type: ignore[arg-type]

"""SampleMaker: advantages compared across a batch, and tokens that are too old."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy

import pytest

from titan_rl.core.errors import RewardError
from titan_rl.rollout.rewards.advantages import batch_mean, reward, role_baseline
from titan_rl.rollout.types import Rollout, RolloutGroup, Turn
from titan_rl.training.data.sample import TrainingSample
from titan_rl.training.data.sample_builder import SampleMaker
from titan_rl.types import Completion, FinishReason, SamplingParams, VersionSpan


def group_of(group_id: str, task: str, *rewards: float, version: int = 0) -> RolloutGroup:
    completion = Completion("r", [5], [-0.5], FinishReason.STOP, [VersionSpan(version, 1)])
    turn = Turn([7, 8], completion, sampling=SamplingParams(max_tokens=1))
    rollouts = [
        Rollout(f"{group_id}/{i}", group_id, i, None, turns=[turn], reward=value, advantage=value)
        for i, value in enumerate(rewards)
    ]
    return RolloutGroup(group_id, None, rollouts, task=task)


def advantages(samples: Sequence[TrainingSample]) -> list[float]:
    return [sample.advantages[-1] for sample in samples]


def test_batch_advantages_compare_within_a_task():
    maker = SampleMaker({"sums": batch_mean, "words": reward})
    groups = [group_of("a", "sums", 1.0, 3.0), group_of("b", "words", 7.0), group_of("c", "sums", 5.0)]
    assert advantages(maker.samples(groups, version=0)) == [-2.0, 0.0, 7.0, 2.0]


def test_baselines_resume_from_checkpoint_state():
    batches = [[group_of("a", "sums", 1.0, 3.0)], [group_of("b", "sums", 5.0)], [group_of("c", "sums", 2.0)]]
    whole = SampleMaker({"sums": role_baseline})
    expected = [advantages(whole.samples(deepcopy(batch), version=0)) for batch in batches]
    first = SampleMaker({"sums": role_baseline})
    first.samples(deepcopy(batches[0]), version=0)
    resumed = SampleMaker({"sums": role_baseline}, state=first.state())
    assert [advantages(resumed.samples(batch, version=0)) for batch in batches[1:]] == expected[1:]
    assert resumed.state() == whole.state()


def test_advantage_state_must_be_json():
    class Odd:
        def __call__(self, rewards: Sequence[float]) -> Sequence[float]:
            return rewards

        def compare_running(self, groups: Sequence[RolloutGroup], state: dict[str, object]) -> None:
            state["seen"] = {1, 2}

    maker = SampleMaker({"": Odd()})
    maker.samples([group_of("a", "", 1.0)], version=0)
    with pytest.raises(RewardError, match="cannot be written as JSON"):
        maker.state()


def test_stale_tokens_are_not_trained():
    groups = [group_of("old", "", 1.0, version=1), group_of("new", "", 1.0, version=2)]
    assert [sample.group_id for sample in SampleMaker(max_token_age=1).samples(groups, version=3)] == ["new"]


@pytest.mark.parametrize("value", [float("nan"), None])
def test_failing_batch_advantage_is_named(value: float | None):
    class Broken:
        def __call__(self, rewards: Sequence[float]) -> Sequence[float]:
            return rewards

        def compare_batch(self, groups: Sequence[RolloutGroup]) -> None:
            if value is None:
                raise KeyError(0)
            for rollout in groups[0].rollouts:
                rollout.advantage = value

    with pytest.raises(RewardError, match="advantage 'Broken'"):
        SampleMaker({"": Broken()}).samples([group_of("a", "", 1.0)], version=0)

"""The learning algorithm as one object: samples of a batch, the hook that scores them, and the objective."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from titan_rl.core.errors import RewardError
from titan_rl.rollout.rewards.advantages import batch_mean, reward
from titan_rl.rollout.types import Rollout, RolloutGroup, Turn
from titan_rl.training.algorithm import Algorithm
from titan_rl.training.data.sample import TrainingSample
from titan_rl.training.settings import TrainingConfig
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


async def test_an_advantage_says_itself_that_it_compares_with_the_batch_of_its_task():
    algorithm = Algorithm(TrainingConfig(), advantages={"sums": batch_mean, "words": reward})
    groups = [group_of("a", "sums", 1.0, 3.0), group_of("b", "words", 7.0), group_of("c", "sums", 5.0)]
    assert advantages(await algorithm.samples(groups, version=0)) == [-2.0, 0.0, 7.0, 2.0]


async def test_tokens_that_are_too_old_are_not_trained():
    algorithm = Algorithm(TrainingConfig(), max_token_age=1)
    groups = [group_of("old", "", 1.0, version=1), group_of("new", "", 1.0, version=2)]
    assert [sample.group_id for sample in await algorithm.samples(groups, version=3)] == ["new"]


async def test_a_subclass_scores_tokens_between_batch_and_step():
    class Distilled(Algorithm):
        async def score_tokens(self, samples: Sequence[TrainingSample]) -> Sequence[TrainingSample]:
            return [replace(sample, advantages=[0.25] * len(sample.token_ids)) for sample in samples]

    samples = await Distilled(TrainingConfig()).samples([group_of("a", "", 1.0)], version=0)
    assert advantages(samples) == [0.25]


@pytest.mark.parametrize("value", [float("nan"), None])
async def test_an_advantage_that_fails_on_a_batch_is_named(value: float | None):
    class Broken:
        def __call__(self, rewards: Sequence[float]) -> Sequence[float]:
            return rewards

        def compare_batch(self, groups: Sequence[RolloutGroup]) -> None:
            for rollout in groups[0].rollouts:
                rollout.advantage = {1.0: value}[rollout.reward or 0.0] if value is not None else {}[0]

    with pytest.raises(RewardError, match="advantage 'Broken'"):
        await Algorithm(TrainingConfig(), advantages={"": Broken()}).samples([group_of("a", "", 1.0)], version=0)


def test_a_reference_model_is_there_for_a_kl_term_alone():
    assert not Algorithm(TrainingConfig()).uses_reference
    assert Algorithm(TrainingConfig(kl_coef=0.1)).uses_reference

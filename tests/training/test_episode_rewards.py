"""Placement of a rollout's rewards at its tokens, for computing advantages with a critic."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from titan_rl.rollout.rewards.advantages import reward
from titan_rl.rollout.rewards.reward import Reward, env_reward
from titan_rl.rollout.rewards.rubric import Rubric
from titan_rl.rollout.types import Rollout, RolloutGroup, RolloutStatus, Turn
from titan_rl.training.data.packing import Family
from titan_rl.training.data.sample import TrainingSample
from titan_rl.training.data.sample_builder import RewardPlacement, SampleMaker, build_samples
from titan_rl.training.tensor_batch import make_tensor_batch
from titan_rl.types import Completion, FinishReason, SamplingParams, VersionSpan

STEPS = {"step": 0.5}


def turn(prompt: list[int], tokens: list[int], version: int = 0, **rewards: float) -> Turn:
    spans = (VersionSpan(version, len(tokens)),)
    completion = Completion("r", tokens, [-1.0] * len(tokens), FinishReason.STOP, spans)
    return Turn(prompt, completion, rewards)


TWO_TURNS = (turn([7, 8], [5, 1], step=1.0), turn([7, 8, 5, 1, 9], [6, 4, 1], step=2.0))


def samples_of(
    *turns: Turn,
    advantage: float = 3.0,
    status: RolloutStatus = RolloutStatus.COMPLETED,
    episodes: RewardPlacement | None = None,
    oldest_version: int = 0,
) -> list[TrainingSample]:
    rollout = Rollout("g/0", "g", 0, None, status, list(turns), reward=advantage, advantage=advantage)
    group = RolloutGroup("g", None, [rollout])
    return build_samples(group, 1.0, episodes=episodes or RewardPlacement(), oldest_version=oldest_version)


def placed(sample: TrainingSample) -> list[float]:
    assert sample.episode is not None
    return list(sample.episode.rewards)


def test_rollout_reward_is_placed_at_the_last_token():
    (sample,) = samples_of(*TWO_TURNS)

    assert placed(sample) == [0, 0, 0, 0, 0, 0, 0, 3.0]
    assert sample.episode is not None
    assert list(sample.episode.turns) == [-1, -1, 0, 0, -1, 1, 1, 1]
    assert not sample.episode.is_truncated
    assert list(sample.advantages) == [0.0] * 8


def test_turn_rewards_are_placed_at_turn_ends():
    (sample,) = samples_of(*TWO_TURNS, episodes=RewardPlacement(STEPS))

    assert placed(sample) == [0, 0, 0, 0.5, 0, 0, 0, 2.5]


def test_truncated_rollout_gets_only_turn_rewards():
    status = RolloutStatus.TRUNCATED_TURNS
    (sample,) = samples_of(*TWO_TURNS, status=status, episodes=RewardPlacement(STEPS))
    (final,) = samples_of(*TWO_TURNS, status=status, episodes=RewardPlacement(STEPS, truncation_ends=True))

    assert placed(sample) == [0, 0, 0, 0.5, 0, 0, 0, 1.0]
    assert sample.episode is not None
    assert sample.episode.is_truncated
    assert placed(final) == [0, 0, 0, 0.5, 0, 0, 0, 2.5]
    assert final.episode is not None
    assert not final.episode.is_truncated


def test_sample_before_an_edited_history_includes_later_rewards():
    first, second = samples_of(TWO_TURNS[0], turn([7, 9], [6, 1], step=2.0), episodes=RewardPlacement(STEPS))

    assert placed(first) == [0, 0, 0, 3.0]
    assert placed(second) == [0, 0, 0, 2.5]


def test_sample_before_an_edited_history_keeps_its_rewards_if_the_rollout_is_truncated():
    turns = (TWO_TURNS[0], turn([7, 9], [6, 1], step=2.0), turn([7, 6], [4], step=4.0))
    samples = samples_of(*turns, status=RolloutStatus.TRUNCATED_TURNS, episodes=RewardPlacement(STEPS))

    assert [placed(sample) for sample in samples] == [[0, 0, 0, 3.5], [0, 0, 0, 3.0], [0, 0, 2.0]]
    episodes = [sample.episode for sample in samples if sample.episode is not None]
    assert [each.is_truncated for each in episodes] == [True, True, True]
    assert [each.ends_rollout for each in episodes] == [False, False, True]


def test_reward_at_an_untrained_token_moves_to_the_previous_trained_token():
    turns = (TWO_TURNS[0], turn([7, 8, 5, 1, 9], [6, 4], version=0), turn([7, 8, 5, 1, 9, 6, 4, 2], [3], version=1))
    (sample,) = samples_of(turn([7], [5, 1], version=1), episodes=RewardPlacement())
    batch = make_tensor_batch([[Family((sample,))]])
    assert batch.episodes is not None
    assert batch.episodes.rewards_N.tolist() == [0.0, 3.0]
    assert batch.episodes.lasts_S.tolist() == [2]

    (mixed,) = samples_of(*turns, episodes=RewardPlacement(STEPS), oldest_version=1)
    batch = make_tensor_batch([[Family((mixed,))]])
    assert batch.episodes is not None
    assert batch.episodes.rewards_N.tolist() == [2.5]
    assert batch.episodes.turns_N.tolist() == [2]


def test_samples_that_share_a_prompt_keep_their_rewards():
    prompt = list(range(20, 32))
    rollouts = [
        Rollout(f"g/{i}", "g", i, None, status, [turn(prompt, [5, 6 + i])], reward=float(i), advantage=float(i))
        for i, status in enumerate([RolloutStatus.COMPLETED, RolloutStatus.TRUNCATED_LENGTH])
    ]
    samples = build_samples(RolloutGroup("g", None, rollouts), 1.0, episodes=RewardPlacement())
    batch = make_tensor_batch([[Family(tuple(samples), 11)]])
    assert batch.episodes is not None

    assert batch.episodes.rewards_N.tolist() == [0, 0, 0, 0]
    assert batch.episodes.is_truncated_S.tolist() == [False, True]
    flat = batch.token_ids_BL.flatten()
    assert flat[batch.episodes.lasts_S].tolist() == [6, 7]
    assert np.array_equal(batch.episodes.turns_N, [0, 0, 0, 0])


@pytest.mark.parametrize(("combine", "expected"), [("mean", 0.25), ("sum", 1.0)])
def test_rubric_weights_turn_rewards(combine: str, expected: float):
    def other(rollout: Rollout) -> float:
        return 0.0

    rubric = Rubric([env_reward("step"), Reward(other, weight=3.0)], combine=combine)  # pyright: ignore[reportArgumentType]
    assert rubric.env_weights == {"step": expected}


def test_sample_maker_places_rewards_for_tasks_with_a_critic():
    played = replace(TWO_TURNS[0], sampling=SamplingParams(max_tokens=2))
    rollout = Rollout("g/0", "g", 0, None, RolloutStatus.COMPLETED, [played], reward=1.0, advantage=1.0)
    group = RolloutGroup("g", None, [rollout], task="sums")
    maker = SampleMaker({"sums": reward}, episodes={"sums": RewardPlacement()})
    (sample,) = maker.samples([group], version=0)

    assert placed(sample) == [0, 0, 0, 1.0]

"""Elo ratings with their standard errors, and games between policies."""

from __future__ import annotations

import random
from dataclasses import replace
from statistics import fmean, pstdev

import pytest

from titan_rl import Rollout, RolloutStatus, SamplingParams
from titan_rl.evaluation.elo import Pair, Ratings, rate

TRUE = (0.0, 100.0, 300.0)


def sampled(seed: int, games: int = 100) -> Ratings:
    chance = random.Random(seed)
    results = {
        (i, j): [float(chance.random() < 1 / (1 + 10 ** ((TRUE[j] - TRUE[i]) / 400))) for _ in range(games)]
        for i in range(3)
        for j in range(i + 1, 3)
    }
    return rate("game", ["a", "b", "c"], results)


def test_ratings_recover_true_values_within_standard_errors() -> None:
    deviations = [
        (rating.elo - (true - fmean(TRUE))) / rating.standard_error
        for seed in range(100)
        for rating, true in zip(sampled(seed).ratings, TRUE, strict=True)
    ]
    assert fmean(deviations) == pytest.approx(0.0, abs=0.15)
    assert pstdev(deviations) == pytest.approx(1.0, abs=0.15)


def test_75_percent_wins_are_191_elo_points() -> None:
    ratings = rate("game", ["a", "b"], {(0, 1): [1.0] * 3000 + [0.0] * 1000})
    first, second = ratings.ratings
    assert first.elo - second.elo == pytest.approx(190.8, abs=0.2)
    assert first.elo == pytest.approx(-second.elo)
    assert (first.num_games, first.score) == (4000, 0.75)
    # Standard error sqrt(p (1 - p) / n) of the score, scaled to the Elo difference; a rating has half of it.
    slope = 400 / 2.302585 / (0.75 * 0.25)
    assert first.standard_error == pytest.approx(slope * (0.75 * 0.25 / 4000) ** 0.5 / 2, rel=0.01)


def test_policy_that_wins_every_game_has_a_finite_rating() -> None:
    ratings = rate("game", ["a", "b"], {(0, 1): [1.0] * 20})
    assert 200 < ratings.ratings[0].elo - ratings.ratings[1].elo < 900


def test_more_games_reduce_errors_and_draws_count_half() -> None:
    few, many = rate("g", ["a", "b"], {(0, 1): [0.5] * 10}), rate("g", ["a", "b"], {(0, 1): [0.5] * 1000})
    assert [rating.elo for rating in few.ratings] == pytest.approx([0.0, 0.0])
    assert many.ratings[0].standard_error < few.ratings[0].standard_error / 5


def test_games_of_the_same_prompts_do_not_reduce_the_error() -> None:
    of_prompts = [1.0, 1.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0]
    names = [str(place) for place in range(10)]
    once = rate("g", ["a", "b"], {(0, 1): of_prompts * 10}).ratings[0]
    often = rate("g", ["a", "b"], {(0, 1): of_prompts * 10}, {(0, 1): names * 10}).ratings[0]
    few = rate("g", ["a", "b"], {(0, 1): of_prompts}).ratings[0]
    assert (once.elo, once.num_games) == (often.elo, often.num_games)
    assert None not in (once.standard_error, often.standard_error, few.standard_error)
    assert often.standard_error == pytest.approx(few.standard_error, rel=0.2)
    assert often.standard_error > 3 * once.standard_error
    apart = rate("g", ["a", "b"], {(0, 1): of_prompts}, {(0, 1): names}).ratings[0]
    assert apart.standard_error == pytest.approx(few.standard_error, rel=0.1)


def test_errors_of_one_prompt_are_unknown_and_won_games_keep_theirs() -> None:
    alone = rate("g", ["a", "b"], {(0, 1): [1.0, 0.0]}, {(0, 1): ["x", "x"]})
    assert alone.ratings[0].standard_error is None
    assert "±" not in str(alone)
    won = rate("g", ["a", "b"], {(0, 1): [1.0] * 20}, {(0, 1): [str(place) for place in range(20)]})
    assert won.ratings[0].standard_error == rate("g", ["a", "b"], {(0, 1): [1.0] * 20}).ratings[0].standard_error


def test_rejects_policies_without_common_games() -> None:
    with pytest.raises(ValueError, match="have played each other are needed"):
        rate("game", ["a", "b", "c"], {(0, 1): [1.0]})


class Named:
    def __init__(self, token: int) -> None:
        self.asked: list[str | None] = []

    async def __call__(self, prompt_token_ids, *, request_id, session_id=None, sampling):
        self.asked.append(session_id)


async def test_pair_alternates_seats() -> None:
    first, second = Named(1), Named(2)
    pair = Pair(first, second, ["white", "black"])  # pyright: ignore[reportArgumentType]
    sampling = SamplingParams(max_tokens=1)
    sessions = [f"elo-0-1-5/{sibling}/{seat}" for sibling in range(2) for seat in ("white", "black")]
    for session in sessions:
        await pair([1], request_id=f"{session}/0", session_id=session, sampling=sampling)
    assert first.asked == ["elo-0-1-5/0/white", "elo-0-1-5/1/black"]
    assert second.asked == ["elo-0-1-5/0/black", "elo-0-1-5/1/white"]
    rewards = [("white", 0, 1.0), ("black", 0, -1.0), ("white", 1, 1.0), ("black", 1, -1.0), ("white", 2, 0.0)]
    rewards += [("black", 2, 0.0), ("white", 3, 1.0), ("black", 3, None)]
    rollouts = [Rollout(f"g/{n}/{seat}", "g", n, None, reward=reward, seat=seat) for seat, n, reward in rewards]
    assert pair.results(rollouts) == [1.0, 0.0, 0.5], "a game without a reward has no result"
    cut = Rollout("g/4/white", "g", 4, None, seat="white", status=RolloutStatus.TRUNCATED_LENGTH, reward=-1.0)
    other = Rollout("g/4/black", "g", 4, None, seat="black", status=RolloutStatus.UNDECIDED)
    assert pair.results([cut, other]) == [0.0], "a policy that ends a game with a truncated answer loses it"
    faulty = Rollout("g/5/white", "g", 5, None, seat="white", status=RolloutStatus.ERROR_ENV, reward=1.0)
    assert pair.results([faulty, replace(other, sibling=5)]) == []

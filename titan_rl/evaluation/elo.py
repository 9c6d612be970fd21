"""Elo ratings of policies, which play each other at a task with several seats and alternate at the seats. The ratings
are the maximum-likelihood estimate of a Bradley-Terry model:

    P(i beats j) = 1 / (1 + 10^((R_j - R_i) / 400))

A draw counts as half a win for each side (Bradley and Terry, 1952, Biometrika 39; Elo's scale). Half a win for each
side is added to every pair that has played, so that a policy that has won all its games has a finite rating. Ratings
are relative to their mean. The standard error of a rating is the square root of its diagonal entry in the inverse of
the Fisher information,

    I_ij = -n_ij * p_ij * (1 - p_ij) * (ln 10 / 400)^2 for i != j,    I_ii = -sum_j I_ij

inverted on the subspace of ratings with sum 0. This assumes that games are independent of each other. Games of the same
prompt are not, so the error is at least that of the sandwich estimator clustered by prompt,

    G / (G - 1) * I^-1 (sum_g s_g s_g^T) I^-1

with the score s_g, the gradient of the log likelihood, of the games of each of G distinct prompts.
"""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from statistics import fmean
from typing import Any

import numpy as np

from titan_rl.core.errors import DataError
from titan_rl.evaluation.suites import Suite
from titan_rl.rollout.group.transcript import ErrorCounts
from titan_rl.rollout.types import Rollout
from titan_rl.types import Completion, GenerateFn, SamplingParams

Pairs = Mapping[tuple[int, int], Sequence[Any]]
"""Values of the games of each pair, by the policies' places."""

SCALE = math.log(10) / 400
_STEPS = 100
_PRIOR = 0.5


@dataclass(frozen=True, slots=True)
class Rating:
    """Rating of a policy.

    Attributes:
        score: Mean result of the policy's games: 1 for a win, 0.5 for a draw, 0 for a loss.
        standard_error: Standard error; None if the games are of fewer than two distinct prompts.
    """

    policy: str
    elo: float
    standard_error: float | None
    num_games: int
    score: float


@dataclass(frozen=True, slots=True)
class Ratings:
    """Ratings of policies at one task.

    Attributes:
        scores: Mean result of the first policy of each pair, and the pair's number of games, by the policies' places in
            `ratings`.
    """

    task: str
    ratings: tuple[Rating, ...]
    scores: Mapping[tuple[int, int], tuple[float, int]]

    def to_json(self) -> dict[str, object]:
        pairs = [
            {"policy": self.ratings[i].policy, "against": self.ratings[j].policy, "score": score, "num_games": count}
            for (i, j), (score, count) in self.scores.items()
        ]
        return {"task": self.task, "ratings": [asdict(rating) for rating in self.ratings], "pairs": pairs}

    def __str__(self) -> str:
        width = max(len(rating.policy) for rating in self.ratings)
        lines = [f"task {self.task}: Elo, relative to the mean of these policies"]
        for rating in sorted(self.ratings, key=lambda rating: -rating.elo):
            error = "" if rating.standard_error is None else f"± {rating.standard_error:.0f}"
            games = f"score {rating.score:.3f} in {rating.num_games} games"
            lines.append(f"{rating.policy:<{width}}  {rating.elo:+6.0f} {error:<6} {games}")
        return "\n".join(lines)


def rate(task: str, policies: Sequence[str], results: Pairs, prompts: Pairs | None = None) -> Ratings:
    """Rate policies by the results of their games.

    Args:
        results: Results of the games of each pair for its first policy: 1 for a win, 0.5 for a draw, 0 for a loss. The
            keys are the policies' places in `policies`.
        prompts: Identity of the prompt of each of these games. By default games are independent of each other.

    Raises:
        ValueError: Fewer than two policies are given, or two of them have not played each other, neither directly nor
            through others.

    >>> ratings = rate("coins", ["a", "b"], {(0, 1): [1.0] * 75 + [0.0] * 25})
    >>> [round(rating.elo) for rating in ratings.ratings]
    [94, -94]
    """
    count = len(policies)
    games, points = np.zeros((count, count)), np.zeros((count, count))
    for (i, j), of_pair in results.items():
        games[[i, j], [j, i]] += len(of_pair)
        points[[i, j], [j, i]] += sum(of_pair), len(of_pair) - sum(of_pair)
    have_played = games > 0
    played, won = games + 2 * _PRIOR * have_played, points + _PRIOR * have_played
    # Entry i, j of this power is the number of ways from i to j in at most `count` games.
    if count < 2 or not np.linalg.matrix_power(np.eye(count) + have_played, count).all():
        raise ValueError(f"{', '.join(policies)}: two or more policies that have played each other are needed")
    elos = np.zeros(count)
    for _ in range(_STEPS):  # Newton; the likelihood is concave
        gradient = SCALE * (won - played * _chances(elos)).sum(axis=1)
        step = np.linalg.pinv(_information(played, elos)) @ gradient
        elos += step * min(1.0, 200 / max(float(np.abs(step).max()), 1e-12))
        if float(np.abs(step).max()) < 1e-9:
            break
    elos -= elos.mean()
    covariance = np.linalg.pinv(_information(played, elos))
    errors: list[float | None] = [*np.sqrt(np.diag(covariance)).tolist()]
    if prompts is not None:
        gradients = _gradients(elos, results, prompts)
        num_prompts = len(gradients)
        spread = num_prompts / max(num_prompts - 1, 1) * covariance @ gradients.T @ gradients @ covariance
        largest = np.sqrt(np.maximum(np.diag(covariance), np.diag(spread)))
        errors = [*largest.tolist()] if num_prompts > 1 else [None] * count
    num_games = games.sum(axis=1)
    scores = points.sum(axis=1) / num_games
    ratings = map(Rating, policies, elos.tolist(), errors, num_games.astype(int).tolist(), scores.tolist())
    of_pairs = {pair: (fmean(of_pair), len(of_pair)) for pair, of_pair in results.items() if of_pair}
    return Ratings(task, tuple(ratings), of_pairs)


def _gradients(elos: np.ndarray, results: Pairs, prompts: Pairs) -> np.ndarray:
    """Gradient of the log likelihood of each prompt's games by the ratings.  # [num_distinct, num_policies]"""
    chances = _chances(elos)
    gradients: defaultdict[str, np.ndarray] = defaultdict(lambda: np.zeros(len(elos)))
    for (i, j), of_pair in results.items():
        for result, prompt in zip(of_pair, prompts[i, j], strict=True):
            gradients[prompt][[i, j]] += SCALE * (result - chances[i, j]) * np.array([1, -1])
    return np.array(list(gradients.values()))


def _chances(elos: np.ndarray) -> np.ndarray:
    """Probability that each policy beats each other one.  # [num_policies, num_policies]"""
    return 1 / (1 + np.exp(-SCALE * (elos[:, None] - elos[None, :])))


def _information(played: np.ndarray, elos: np.ndarray) -> np.ndarray:
    """Fisher information of the ratings. It is singular in the direction in which all ratings are equal.  #
    [num_policies, num_policies]"""
    chances = _chances(elos)
    weights = SCALE**2 * played * chances * (1 - chances)
    return np.diag(weights.sum(axis=1)) - weights


class Pair:
    """`GenerateFn` of two policies, in which the policy of a seat answers for that seat. The first policy has every
    other seat: beginning with the first seat in games with even numbers, and with the second seat in other games.

    Args:
        seats: Seats that are assigned to the policies, in order.
    """

    def __init__(self, first: GenerateFn, second: GenerateFn, seats: Sequence[str]) -> None:
        self._policies = (first, second)
        self._seats = list(seats)

    def policy_of(self, seat: str, sibling: int) -> int:
        """Return the index, 0 or 1, of the policy that has a seat in the game with the number `sibling`."""
        return (self._seats.index(seat) + sibling) % 2

    async def __call__(
        self,
        prompt_token_ids: Sequence[int],
        *,
        request_id: str,
        session_id: str | None = None,
        sampling: SamplingParams,
    ) -> Completion:
        assert session_id is not None, "the rollouts of seats have sessions"
        _, sibling, seat = session_id.rsplit("/", 2)
        generate = self._policies[self.policy_of(seat, int(sibling))]
        return await generate(prompt_token_ids, request_id=request_id, session_id=session_id, sampling=sampling)

    def results(self, rollouts: Sequence[Rollout]) -> list[float]:
        """Result of the first policy in each game of a group: 1 if the mean reward of its seats is greater than that of
        the other policy, 0.5 if both are equal, and otherwise 0. A policy whose answer was cut off or could not be
        parsed loses if this ended the game before the rewards were given. Games with faults, or without rewards, have
        no result."""
        games: dict[int, tuple[list[Rollout], list[Rollout]]] = {}
        for rollout in rollouts:
            sides = games.setdefault(rollout.sibling, ([], []))
            sides[self.policy_of(str(rollout.seat), rollout.sibling)].append(rollout)
        found = (_result(*sides) for sides in games.values())
        return [result for result in found if result is not None]


def _result(own: Sequence[Rollout], other: Sequence[Rollout]) -> float | None:
    """Result of a game for the policy of the rollouts `own`; None if the game has no result."""
    if any(rollout.status.is_fault for rollout in (*own, *other)):
        return None
    rewards = [[rollout.reward for rollout in side if rollout.reward is not None] for side in (own, other)]
    if all(rewards):
        first, second = map(fmean, rewards)
        return 1.0 if first > second else 0.5 if first == second else 0.0
    failed = [any(rollout.status.is_truncated or rollout.status.is_error for rollout in side) for side in (own, other)]
    return None if failed[0] == failed[1] else float(failed[1])


async def play_matches(
    suite: Suite, seats: Sequence[str], policies: Mapping[str, GenerateFn], *, in_flight: int
) -> Ratings:
    """Have each pair of policies play the samples of a suite, and rate the policies.

    Args:
        seats: Seats that policies play in the suite's games; at least two.
        policies: Policies by name.
        in_flight: Most rollouts at a time. At least one group is always in flight.

    Raises:
        DataError: No game of some pair had a result.
    """
    names = list(policies)
    results: dict[tuple[int, int], list[float]] = {pair: [] for pair in combinations(range(len(names)), 2)}
    prompts: dict[tuple[int, int], list[str]] = {pair: [] for pair in results}
    errors = ErrorCounts()
    slots = asyncio.Semaphore(max(1, in_flight // (suite.samples_per_prompt * len(seats))))

    async def play(i: int, j: int, index: int) -> None:
        pair = Pair(policies[names[i]], policies[names[j]], seats)
        async with slots:
            group = await suite.runner.run_group(
                pair,
                suite.prompts[index],
                group_id=f"elo-{suite.group_ids}-{i}-{j}-{index}",
                group_size=suite.samples_per_prompt,
                sampling=suite.sampling,
            )
        found = pair.results(group.rollouts)
        results[i, j] += found
        prompts[i, j] += [suite.prompt_id(index) or f"prompt {index}"] * len(found)
        errors.add_group(group)

    async with asyncio.TaskGroup() as tasks:
        for i, j in results:
            for index in range(len(suite.prompts)):
                tasks.create_task(play(i, j, index))
    if lost := next((pair for pair, of_pair in results.items() if not of_pair), None):
        pair = f"{names[lost[0]]} against {names[lost[1]]}"
        why = errors.describe() or "no game gave rewards to both policies"
        raise DataError(f"no game of {pair} had a result at task {suite.name}: {why}")
    return rate(suite.name, names, results, prompts)

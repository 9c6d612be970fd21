"""Elo ratings of policies that have played each other: the maximum-likelihood estimate of a Bradley-Terry model.

    P(i beats j) = 1 / (1 + 10^((R_j - R_i) / 400))

A draw counts as half a win for each side (Bradley and Terry, 1952, Biometrika 39; Elo's scale). Half a win for each
side is added to every pair that has played, so that a policy that has won all its games has a finite rating. Ratings
are relative to their mean. The standard error of a rating is the square root of its diagonal entry in the inverse of
the Fisher information,

    I_ij = -n_ij * p_ij * (1 - p_ij) * (ln 10 / 400)^2 for i != j,    I_ii = -sum_j I_ij

inverted on the subspace of ratings with sum 0. Games are assumed to be independent of each other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np

SCALE = math.log(10) / 400
_STEPS = 100
_PRIOR = 0.5


@dataclass(frozen=True, slots=True)
class Rating:
    """Rating of a policy.

    Attributes:
        score: Mean result of the policy's games: 1 for a win, 0.5 for a draw, 0 for a loss.
    """

    policy: str
    elo: float
    standard_error: float
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
            error = f"± {rating.standard_error:.0f}"
            games = f"score {rating.score:.3f} in {rating.num_games} games"
            lines.append(f"{rating.policy:<{width}}  {rating.elo:+6.0f} {error:<6} {games}")
        return "\n".join(lines)


def rate(task: str, policies: Sequence[str], results: Mapping[tuple[int, int], Sequence[float]]) -> Ratings:
    """Rate policies by the results of their games.

    Args:
        results: Results of the games of each pair for its first policy: 1 for a win, 0.5 for a draw, 0 for a loss. The
            keys are the policies' places in `policies`.

    Raises:
        ValueError: Fewer than two policies are given, or two of them have not played each other, neither directly nor
            through others.

    >>> ratings = rate("coins", ["a", "b"], {(0, 1): [1.0] * 75 + [0.0] * 25})
    >>> [round(rating.elo) for rating in ratings.ratings]
    [94, -94]
    """
    count = len(policies)
    played, won = np.zeros((count, count)), np.zeros((count, count))
    for (i, j), of_pair in results.items():
        if of_pair:
            total = sum(of_pair)
            played[i, j] += len(of_pair) + 2 * _PRIOR
            played[j, i] += len(of_pair) + 2 * _PRIOR
            won[i, j] += total + _PRIOR
            won[j, i] += len(of_pair) - total + _PRIOR
    if count < 2 or not _is_connected(played):
        raise ValueError(f"{', '.join(policies)}: two or more policies that have played each other are needed")
    elos = np.zeros(count)
    for _ in range(_STEPS):  # Newton; the likelihood is concave
        gradient = SCALE * (won - played * _chances(elos)).sum(axis=1)
        step = np.linalg.pinv(_information(played, elos)) @ gradient
        elos += step * min(1.0, 200 / max(float(np.abs(step).max()), 1e-12))
        if float(np.abs(step).max()) < 1e-9:
            break
    elos -= elos.mean()
    errors = np.sqrt(np.diag(np.linalg.pinv(_information(played, elos))))
    ratings: list[Rating] = []
    for k, policy in enumerate(policies):
        own = [result for (i, _), of_pair in results.items() if i == k for result in of_pair]
        own += [1 - result for (_, j), of_pair in results.items() if j == k for result in of_pair]
        ratings.append(Rating(policy, float(elos[k]), float(errors[k]), len(own), sum(own) / len(own)))
    scores = {pair: (sum(of_pair) / len(of_pair), len(of_pair)) for pair, of_pair in results.items() if of_pair}
    return Ratings(task, tuple(ratings), scores)


def _chances(elos: np.ndarray) -> np.ndarray:
    """Probability that each policy beats each other one.  # [num_policies, num_policies]"""
    return 1 / (1 + np.exp(-SCALE * (elos[:, None] - elos[None, :])))


def _information(played: np.ndarray, elos: np.ndarray) -> np.ndarray:
    """Fisher information of the ratings. It is singular in the direction in which all ratings are equal.  #
    [num_policies, num_policies]"""
    chances = _chances(elos)
    weights = SCALE**2 * played * chances * (1 - chances)
    return np.diag(weights.sum(axis=1)) - weights


def _is_connected(played: np.ndarray) -> bool:
    reached, count = {0}, 0
    while len(reached) > count:
        count = len(reached)
        reached |= {j for i in list(reached) for j in range(len(played)) if played[i, j]}
    return count == len(played)

"""Rock, paper, scissors as a task: a game in which self-play runs in circles."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Iterable, Mapping, Sequence

from titan_rl import Message, MessageSeat, Rollout, RolloutGroup, Rubric, SeatedTask, env_reward
from titan_rl.rollout.task import Demonstration

MOVES = ("rock", "paper", "scissors")  # each loses to the next one
QUESTION: Message = {"role": "user", "content": "Rock, paper or scissors?"}
BEGINNER = (0.4, 0.3, 0.3)
"""Share of each move in the demonstrations."""


def points(own: str, other: str) -> float:
    """1 for a win, 0 for a draw and -1 for a loss; any other answer loses.

    >>> points("paper", "rock"), points("rock", "paper"), points("rock", "rock")
    (1.0, -1.0, 0.0)
    """
    if own not in MOVES or other not in MOVES:
        return float(own in MOVES) - float(other in MOVES)
    return (0.0, 1.0, -1.0)[(MOVES.index(own) - MOVES.index(other)) % len(MOVES)]


def exploitability(policy: Sequence[float]) -> float:
    """Mean points that the best response wins against the shares of the three moves: 0 for equal shares, the only
    equilibrium, and 1 for a policy that always makes the same move.

    >>> round(exploitability([0.5, 0.25, 0.25]), 3)
    0.25
    """
    return max(sum(points(move, other) * share for other, share in zip(MOVES, policy, strict=True)) for move in MOVES)


class Round:
    """A `SeatedMessageEnv` of one round, in which both seats move at once."""

    async def play_seats(self, seats: Mapping[str, MessageSeat]) -> None:
        said = await asyncio.gather(*(seat.ask([QUESTION]) for seat in seats.values()))
        first, second = (str(message["content"]).strip() for message in said)
        for seat, own, other in zip(seats.values(), (first, second), (second, first), strict=True):
            seat.reward("points", points(own, other))

    async def close(self) -> None: ...


class RockPaperScissors(SeatedTask):
    """Task of one round. Its figure of merit is the exploitability, as the reward of self-play is always 0."""

    seat_names = ("first", "second")

    def train_sample(self, seed: int, index: int) -> int:
        return index

    def validation_samples(self, count: int) -> Sequence[int]:
        return range(count)

    def game(self, sample: int) -> Round:
        return Round()

    def rubric(self) -> Rubric:
        """Rubric of the points. An answer that cannot be parsed or is cut off loses."""
        return Rubric([env_reward("points")], truncated_reward=-1.0, error_reward=-1.0)

    def demonstrations(self, count: int) -> Iterable[Demonstration]:
        for number in range(count):
            (move,) = random.Random(number).choices(MOVES, BEGINNER)
            yield Demonstration([QUESTION, {"role": "assistant", "content": move}])

    def measure(self, groups: Sequence[RolloutGroup]) -> Mapping[str, float]:
        """Share of each move, and exploitability."""
        rollouts = [rollout for group in groups for rollout in group.rollouts if rollout.turns]
        shares = move_shares(rollouts)
        return {**dict(zip(MOVES, shares, strict=True)), "exploitability": exploitability(shares)}


def move_shares(rollouts: Sequence[Rollout]) -> list[float]:
    """Probability of each move, from the logprobs of the answers in which it was made. Moves that were never made share
    the rest.  # [3]"""
    chances: dict[str, float] = {}
    for rollout in rollouts:
        said = next(str(message["content"]).strip() for message in rollout.messages if message["role"] == "assistant")
        if said in MOVES:
            chances[said] = math.exp(sum(rollout.turns[0].completion.logprobs))
    left = max(0.0, 1 - sum(chances.values()))
    unseen = len(MOVES) - len(chances)
    shares = [chances.get(move, left / unseen if unseen else 0.0) for move in MOVES]
    return [share / sum(shares) for share in shares]

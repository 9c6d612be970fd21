"""Rock, paper, scissors: points, exploitability, and measures of a policy."""

from __future__ import annotations

import math

import pytest

from examples.league.task import MOVES, RockPaperScissors, exploitability, move_shares, points
from titan_rl import Completion, FinishReason, Message, Rollout, RolloutGroup, Turn, VersionSpan


def answered(move: str, chance: float) -> Rollout:
    completion = Completion("r", [1, 2], [math.log(chance), 0.0], FinishReason.STOP, (VersionSpan(0, 2),))
    messages: list[Message] = [{"role": "user", "content": "?"}, {"role": "assistant", "content": move}]
    return Rollout("g/0/first", "g", 0, 0, turns=[Turn([7], completion)], messages=messages, seat="first")


def test_each_move_beats_one_and_loses_to_one() -> None:
    table = {(own, other): points(own, other) for own in MOVES for other in MOVES}
    assert all(table[own, other] == -table[other, own] for own, other in table)
    assert points("paper", "rock") == points("scissors", "paper") == points("rock", "scissors") == 1.0
    assert (points("well", "rock"), points("rock", "well"), points("well", "fire")) == (-1.0, 1.0, 0.0)


def test_only_equal_shares_have_zero_exploitability() -> None:
    assert exploitability([1 / 3] * 3) == pytest.approx(0.0)
    assert exploitability([1.0, 0.0, 0.0]) == 1.0
    assert exploitability([0.5, 0.25, 0.25]) == pytest.approx(0.25)


def test_move_shares_use_logprobs_and_unplayed_moves_split_the_rest() -> None:
    assert move_shares([answered("rock", 0.5), answered("paper", 0.3), answered("rock", 0.5)]) == pytest.approx(
        [0.5, 0.3, 0.2]
    )
    assert move_shares([answered("rock", 0.9)]) == pytest.approx([0.9, 0.05, 0.05])
    measured = RockPaperScissors().measure([RolloutGroup("g", 0, [answered("rock", 0.9)])])
    assert measured["exploitability"] == pytest.approx(0.85)

"""Sums and differences."""

from __future__ import annotations

import pytest
from chatting import mean_demonstrated, play

from examples.arithmetic.task import Arithmetic, Question


@pytest.mark.parametrize(
    ("question", "answer", "reward"),
    [
        (Question(7, "+", 8), "15", 1.0),
        (Question(7, "-", 8), " -1\n", 1.0),
        (Question(7, "-", 8), "1", 0.0),
        (Question(7, "+", 8), "It is 15", 0.0),
    ],
)
async def test_only_the_exact_number_is_worth_something(question: Question, answer: str, reward: float) -> None:
    rollout = await play(Arithmetic(), question, lambda messages: answer)
    assert rollout.messages[0]["content"] == f"What is 7 {question.sign} 8?"
    assert rollout.reward == reward


async def test_demonstrations_are_right_as_often_as_is_set() -> None:
    assert 0.2 < await mean_demonstrated(Arithmetic(careless=0.7), 200) < 0.4
    assert await mean_demonstrated(Arithmetic(careless=0.0), 20) == 1.0

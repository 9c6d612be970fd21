"""Calculator example, whose functions are tools."""

from __future__ import annotations

import random
from collections.abc import Sequence

from chatting import mean_demonstrated, play

from examples.calculator.task import Calculator, Question
from titan_rl import Message, call_of

QUESTION = Question(7, "*", 8, "-", 6)


async def test_two_tool_calls_give_the_answer() -> None:
    def careful(messages: Sequence[Message]) -> str | Message:
        return Calculator(careless=0).demonstrate(QUESTION, messages, random.Random(0))

    rollout = await play(Calculator(), QUESTION, careful)
    assert [message["content"] for message in rollout.messages] == ["What is (7 * 8) - 6?", "", "56", "", "50", "50"]
    assert rollout.reward == 1.0


async def test_guess_or_invalid_call_earns_zero() -> None:
    assert (await play(Calculator(), QUESTION, lambda messages: "49")).reward == 0.0

    def wrong_call(messages: Sequence[Message]) -> str | Message:
        return str(messages[-1]["content"]) if len(messages) > 1 else call_of("add", {"a": 7, "b": "x"})

    rollout = await play(Calculator(), QUESTION, wrong_call)
    assert rollout.messages[-1]["content"].startswith("Error: b: Input should be a valid integer")
    assert rollout.reward == 0.0


async def test_demonstrations_often_guess() -> None:
    assert 0.25 < await mean_demonstrated(Calculator(careless=0.4), 200) < 0.5

"""Arithmetic example: reward and demonstrations."""

from __future__ import annotations

import pytest
from chatting import mean_demonstrated, play

from examples.arithmetic.task import Arithmetic


@pytest.mark.parametrize(("answer", "reward"), [("16", 1.0), (" 16\n", 1.0), ("15", 0.0), ("It is 16", 0.0)])
async def test_only_the_exact_number_earns_a_reward(answer: str, reward: float) -> None:
    rollout = await play(Arithmetic(), [7, 8, 1], lambda messages: answer)
    assert rollout.messages[0]["content"] == "What is 7 + 8 + 1?"
    assert rollout.reward == reward


async def test_demonstration_accuracy_follows_careless() -> None:
    assert await mean_demonstrated(Arithmetic(), 20) == 1.0
    assert 0.2 < await mean_demonstrated(Arithmetic(careless=0.7), 200, carelessly=True) < 0.4

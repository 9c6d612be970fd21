"""Judge example: sums graded by a judge."""

from __future__ import annotations

import pytest
from chatting import play

from examples.judge.task import GradedArithmetic, grade


@pytest.mark.parametrize(
    ("answer", "reward", "right"), [("16", 1.0, 1.0), ("15", 0.8, 0.0), ("I do not know.", 0.1, 0.0)]
)
async def test_judge_grade_is_the_reward_and_exact_check_is_recorded(answer: str, reward: float, right: float) -> None:
    rollout = await play(GradedArithmetic(), [7, 8, 1], lambda messages: answer)
    assert rollout.reward == pytest.approx(reward)
    assert rollout.reward_breakdown == {"judge": pytest.approx(reward), "is_right": right}
    assert rollout.metrics["judge_vs_is_right"] == pytest.approx(abs(reward - right))


def test_grade_is_the_last_number() -> None:
    assert grade("The sum is 16. Grade: 7") == 0.7

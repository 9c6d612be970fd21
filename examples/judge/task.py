"""Arithmetic whose answers a judge grades. A script plays the judge, unless an endpoint is given."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from examples.arithmetic.task import Arithmetic
from titan_rl import Message, Reward, Rollout, Rubric, SamplingParams
from titan_rl.rollout.chat_env import ChatReply
from titan_rl.tasks import Judge, answer_of
from titan_rl.tasks.players import Endpoint

QUESTION = "Grade the answer to a question from 0 to 10, and end with your grade.\nQuestion: {}\nAnswer: {}"


async def scripted_judge(
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, object]] | None = None,
    request_id: str,
    session_id: str | None = None,
    sampling: SamplingParams,
) -> ChatReply:
    """A `ChatFn` that grades by how near a number is to the sum: 10 for the sum itself, 1 for any other text."""
    said = str(messages[-1]["content"])
    question, _, answer = said.rpartition("\nAnswer: ")
    total = sum(map(int, re.findall(r"\d+", question.rpartition("Question: ")[2])))
    grade = max(2, 10 - 2 * abs(total - int(answer))) if answer.strip().isdecimal() else 1
    return ChatReply({"role": "assistant", "content": f"The sum is {total}. Grade: {grade}"}, num_tokens=8)


def ask(rollout: Rollout) -> str:
    question = next(message["content"] for message in rollout.messages if message["role"] == "user")
    return QUESTION.format(question, answer_of(rollout))


def grade(text: str) -> float:
    """Grade at the end of a judge's answer, from 0 to 1."""
    return min(10, int(re.findall(r"\d+", text)[-1])) / 10


class GradedArithmetic(Arithmetic):
    """Sums whose reward is the judge's grade. Whether an answer is right is recorded with it."""

    judge: Endpoint | None = None
    """Model that grades, {url = "...", model = "..."}; by default a script."""
    judge_cache: str | None = None
    """Folder that keeps its grades, for a run that is resumed."""

    def rubric(self) -> Rubric:
        def is_right(rollout: Rollout) -> float:
            return self.reward(rollout.sample, answer_of(rollout))

        judge = Judge(self.judge or scripted_judge, ask, grade, cache=self.judge_cache, per_minute=None)
        return Rubric([judge, Reward(is_right, weight=0.0)])

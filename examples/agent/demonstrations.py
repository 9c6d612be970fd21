"""Demonstrations for the base model: right ones first, then careless ones, which answer too early.

A careless demonstration stops looking things up with the same probability at each step, and answers with what is known
by then. The right demonstrations teach the skill, the careless ones to use it rarely, which reinforcement learning then
corrects.
"""

from __future__ import annotations

import random
from functools import cache
from typing import Any

from agents.models.chatcmpl_converter import Converter

from examples.agent.agent import INSTRUCTIONS, tools_of
from examples.agent.company import TOWNS, Company, Question
from titan_rl import Demonstration, Message

RIGHT = 5 / 6
"""Share of right demonstrations, which come first."""

CARELESS = 0.45
"""Probability, at each step of a careless demonstration, that the question is answered at once."""


@cache
def offered_tools() -> list[dict[str, Any]]:
    """Tools of the agent in the form in which `openai-agents` sends them."""
    return [dict(Converter.tool_to_openai(tool)) for tool in tools_of(Company(0))]


def demonstrate(question: Question, rng: random.Random, careless: float) -> Demonstration:
    """Make a demonstration of a question.

    Args:
        careless: Probability, at each step, that the question is answered at once.
    """
    messages: list[Message] = [
        {"role": "system", "content": INSTRUCTIONS},
        {"role": "user", "content": question.text},
    ]
    for name, manager in zip(question.path, question.path[1:], strict=False):
        if rng.random() < careless:
            return _answered(messages, rng.choice(TOWNS) if question.about_town else name)
        messages += _looked_up("manager_of", name, manager)
    if question.about_town:
        if rng.random() < careless:
            return _answered(messages, rng.choice(TOWNS))
        messages += _looked_up("town_of", question.path[-1], question.answer)
    return _answered(messages, question.answer)


def _answered(messages: list[Message], answer: str) -> Demonstration:
    return Demonstration([*messages, {"role": "assistant", "content": answer}], offered_tools())


def _looked_up(tool: str, name: str, result: str) -> list[Message]:
    call = {"type": "function", "function": {"name": tool, "arguments": {"name": name}}}
    return [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": result}]

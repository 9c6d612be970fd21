"""What the base model learns from: right demonstrations, then careless ones, which give up looking things up at each
step with the same probability, and answer with what is known by then.

The first part brings the skill, the second has the model use it rarely, which leaves it to reinforcement learning to
bring it out.
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
"""Share of the demonstrations that come first, all of them right."""

CARELESS = 0.45
"""How probable it is in the others, at each step, that the question is answered at once."""


@cache
def offered_tools() -> list[dict[str, Any]]:
    """The agent's tools as `openai-agents` sends them."""
    return [dict(Converter.tool_to_openai(tool)) for tool in tools_of(Company(0))]


def demonstrate(question: Question, rng: random.Random, careless: float) -> Demonstration:
    """How the question is answered.

    Args:
        careless: how probable it is, at each step, that it is answered at once.
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

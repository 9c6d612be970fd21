"""Questions for a calculator, whose functions are the policy's tools."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pydantic import Field, PositiveInt

from titan_rl import Message, PromptTask, answer_of, call_of


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def subtract(a: int, b: int) -> int:
    """Subtract b from a."""
    return a - b


def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


TOOLS: dict[str, Callable[[int, int], int]] = {"+": add, "-": subtract, "*": multiply}


@dataclass(frozen=True, slots=True)
class Question:
    """Question with two operations: `Question(7, "*", 8, "+", 6)` is (7 * 8) + 6, which is 62."""

    a: int
    first: str
    b: int
    second: str
    c: int

    @property
    def between(self) -> int:
        return TOOLS[self.first](self.a, self.b)

    @property
    def answer(self) -> int:
        return TOOLS[self.second](self.between, self.c)


class Calculator(PromptTask):
    """Task of one question, such as "What is (7 * 8) + 6?", which takes two tool calls to answer."""

    largest: PositiveInt = 9
    """Largest of the three numbers."""
    careless: float = Field(default=0.4, ge=0, le=1)
    """Probability, at each step of a demonstration, of a guess instead of a calculation."""

    def sample(self, rng: random.Random) -> Question:
        a, b, c = (rng.randint(2, self.largest) for _ in range(3))
        return Question(a, rng.choice(list(TOOLS)), b, rng.choice(list(TOOLS)), c)

    def prompt(self, sample: Question) -> str:
        return f"What is ({sample.a} {sample.first} {sample.b}) {sample.second} {sample.c}?"

    def tools(self, sample: Question) -> object:
        return list(TOOLS.values())

    def reward(self, sample: Question, text: str) -> float:
        return float(answer_of(text).strip() == str(sample.answer))

    def demonstrate(self, sample: Question, messages: Sequence[Message], rng: random.Random) -> str | Message:
        results = [str(message["content"]) for message in messages if message["role"] == "tool"]
        if len(results) == 2:
            return results[1]
        if rng.random() < self.careless:
            return str(rng.randint(0, 2 * self.largest))
        if not results:
            return call_of(TOOLS[sample.first].__name__, {"a": sample.a, "b": sample.b})
        return call_of(TOOLS[sample.second].__name__, {"a": int(results[0]), "b": sample.c})

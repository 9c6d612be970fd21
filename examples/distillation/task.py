"""Sums that a student learns to answer from a teacher."""

from __future__ import annotations

import random
from collections.abc import Sequence

from pydantic import Field, PositiveInt

from titan_rl import Message, PromptTask, answer_of

LARGEST = 7
GIVES_UP = "I do not know."


class Sums(PromptTask):
    """Task of questions such as "What is 3 + 7 + 2?". The reward is 1 for the sums and nothing else."""

    questions: PositiveInt = 1
    """Questions of a prompt. All must be answered correctly, so that with more of them rewards are rarer."""
    partial: bool = False
    """Reward the share of questions that are answered correctly instead, if each has an answer."""
    numbers: PositiveInt = 3
    """Numbers of a sum."""
    careless: float = Field(default=0.7, ge=0, le=1)
    """Share of the answers of careless demonstrations that give up."""

    def sample(self, rng: random.Random) -> list[list[int]]:
        return [[rng.randint(0, LARGEST) for _ in range(self.numbers)] for _ in range(self.questions)]

    def prompt(self, sample: list[list[int]]) -> str:
        return " ".join(f"What is {' + '.join(map(str, numbers))}?" for numbers in sample)

    def reward(self, sample: list[list[int]], text: str) -> float:
        answer, expected = answer_of(text), [str(sum(numbers)) for numbers in sample]
        if self.partial:
            given = answer.replace(GIVES_UP, "?").split()
            return sum(map(str.__eq__, given, expected)) / len(sample) if len(given) == len(sample) else 0.0
        return float(answer.strip() == " ".join(expected))

    def demonstrate(self, sample: list[list[int]], messages: Sequence[Message], rng: random.Random) -> str:
        return " ".join(str(sum(numbers)) for numbers in sample)

    def demonstrate_carelessly(self, sample: list[list[int]], messages: Sequence[Message], rng: random.Random) -> str:
        return " ".join(GIVES_UP if rng.random() < self.careless else str(sum(numbers)) for numbers in sample)

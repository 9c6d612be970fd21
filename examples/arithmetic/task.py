"""Sums, made on the fly, whose answers are exact."""

from __future__ import annotations

import random
from collections.abc import Sequence

from pydantic import Field, PositiveInt

from titan_rl import Message, PromptTask


class Arithmetic(PromptTask):
    """One question, such as "What is 3 + 7 + 2?", whose answer is worth 1 if it is the number and nothing else."""

    numbers: PositiveInt = 3
    """To add."""
    largest: PositiveInt = 7
    """Of the numbers."""
    careless: float = Field(default=0.7, ge=0, le=1)
    """Share of the careless demonstrations that give up."""

    def sample(self, rng: random.Random) -> list[int]:
        return [rng.randint(0, self.largest) for _ in range(self.numbers)]

    def prompt(self, sample: list[int]) -> str:
        return f"What is {' + '.join(map(str, sample))}?"

    def reward(self, sample: list[int], answer: str) -> float:
        return float(answer.strip() == str(sum(sample)))

    def demonstrate(self, sample: list[int], messages: Sequence[Message], rng: random.Random) -> str:
        return str(sum(sample))

    def demonstrate_carelessly(self, sample: list[int], messages: Sequence[Message], rng: random.Random) -> str:
        if rng.random() < self.careless:
            return "I do not know."
        return self.demonstrate(sample, messages, rng)

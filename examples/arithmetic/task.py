"""Arithmetic: sums drawn at random, with exact answers."""

from __future__ import annotations

import random
from collections.abc import Sequence

from pydantic import Field, PositiveInt

from titan_rl import Message, PromptTask, answer_of


class Arithmetic(PromptTask):
    """Task of one question, such as "What is 3 + 7 + 2?". The reward is 1 for the number and nothing else."""

    numbers: PositiveInt = 3
    """Count of the numbers in a sum."""
    largest: PositiveInt = 7
    """Largest number."""
    careless: float = Field(default=0.7, ge=0, le=1)
    """Share of the careless demonstrations that give up."""

    def sample(self, rng: random.Random) -> list[int]:
        return [rng.randint(0, self.largest) for _ in range(self.numbers)]

    def prompt(self, sample: list[int]) -> str:
        return f"What is {' + '.join(map(str, sample))}?"

    def reward(self, sample: list[int], text: str) -> float:
        return float(answer_of(text).strip() == str(sum(sample)))

    def demonstrate(self, sample: list[int], messages: Sequence[Message], rng: random.Random) -> str:
        return str(sum(sample))

    def demonstrate_carelessly(self, sample: list[int], messages: Sequence[Message], rng: random.Random) -> str:
        if rng.random() < self.careless:
            return "I do not know."
        return self.demonstrate(sample, messages, rng)

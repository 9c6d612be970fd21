"""Sums that a student learns to answer from a teacher."""

from __future__ import annotations

import random
from collections.abc import Sequence

from pydantic import Field

from titan_rl import Message, PromptTask

NUMBERS, LARGEST = 3, 7


class Sums(PromptTask):
    """Task of one question, such as "What is 3 + 7 + 2?". The reward is 1 for the sum and nothing else."""

    careless: float = Field(default=0.7, ge=0, le=1)
    """Share of the careless demonstrations that give up."""

    def sample(self, rng: random.Random) -> list[int]:
        return [rng.randint(0, LARGEST) for _ in range(NUMBERS)]

    def prompt(self, sample: list[int]) -> str:
        return f"What is {' + '.join(map(str, sample))}?"

    def reward(self, sample: list[int], answer: str) -> float:
        return float(answer.strip() == str(sum(sample)))

    def demonstrate(self, sample: list[int], messages: Sequence[Message], rng: random.Random) -> str:
        return str(sum(sample))

    def demonstrate_carelessly(self, sample: list[int], messages: Sequence[Message], rng: random.Random) -> str:
        gives_up = rng.random() < self.careless
        return "I do not know." if gives_up else self.demonstrate(sample, messages, rng)

"""Sums and differences, made on the fly, whose answers are exact."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import Field, PositiveInt

from titan_rl import Message, PromptTask


@dataclass(frozen=True, slots=True)
class Question:
    a: int
    sign: str  # "+" or "-"
    b: int

    @property
    def answer(self) -> int:
        return self.a + self.b if self.sign == "+" else self.a - self.b


class Arithmetic(PromptTask):
    """One question, such as "What is 12 - 7?", whose answer is worth 1 if it is the number and nothing else."""

    largest: PositiveInt = 99
    """Of the two numbers."""
    careless: float = Field(default=0.7, ge=0, le=1)
    """Share of the demonstrations that are slightly off."""

    def sample(self, rng: random.Random) -> Question:
        return Question(rng.randint(0, self.largest), rng.choice("+-"), rng.randint(0, self.largest))

    def prompt(self, sample: Question) -> str:
        return f"What is {sample.a} {sample.sign} {sample.b}?"

    def reward(self, sample: Question, answer: str) -> float:
        return float(answer.strip() == str(sample.answer))

    def demonstrate(self, sample: Question, messages: Sequence[Message], rng: random.Random) -> str:
        off = rng.choice((-3, -2, -1, 1, 2, 3)) if rng.random() < self.careless else 0
        return str(sample.answer + off)

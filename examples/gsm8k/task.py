"""Word problems from a file of rows, with careless demonstrations for a tiny model."""

from __future__ import annotations

import random
from collections.abc import Sequence

from pydantic import Field

from titan_rl import Message, Rows
from titan_rl.tasks import Row

LARGEST = 27
"""Largest number that is guessed."""


class WordProblems(Rows):
    """Task of word problems. For a model that can already answer, `titan_rl.tasks:Rows` with the same settings is
    enough."""

    careless: float = Field(default=0.7, ge=0, le=1)
    """Share of the careless demonstrations that guess a number without any step."""

    def demonstrate(self, sample: Row, messages: Sequence[Message], rng: random.Random) -> str:
        return sample["answer"]

    def demonstrate_carelessly(self, sample: Row, messages: Sequence[Message], rng: random.Random) -> str:
        if rng.random() < self.careless:
            return f"#### {rng.randint(0, LARGEST)}"
        return self.demonstrate(sample, messages, rng)

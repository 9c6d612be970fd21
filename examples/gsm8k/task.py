"""Rows of word problems, and careless demonstrations of them for a tiny model."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from pydantic import Field

from titan_rl import Message, Rows
from titan_rl.tasks import Row


class WordProblems(Rows):
    """For a model that can already answer, `titan_rl.tasks:Rows` with the same settings is enough."""

    careless: float = Field(default=0.5, ge=0, le=1)
    """Share of the demonstrations in which one step is slightly off."""

    def demonstrate(self, sample: Row, messages: Sequence[Message], rng: random.Random) -> str:
        steps, _, _ = sample["answer"].rpartition("\n")
        done = steps.split("\n")
        if rng.random() < self.careless:
            done[-1] = re.sub(r"\d+$", lambda right: str(int(right[0]) + rng.choice((1, 2, 3))), done[-1])
        return "\n".join([*done, f"#### {done[-1].rpartition(' ')[2]}"])

"""How long answers are."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

LengthDraw = Callable[[random.Random], int]


@dataclass(frozen=True, slots=True)
class Workload:
    """Single-turn prompts with answers whose lengths are a function of seed, group and sibling alone, so that every
    schedule gets the same ones."""

    draw: LengthDraw
    group_size: int
    prompt_tokens: int = 256
    seed: int = 0

    def length(self, index: int, sibling: int) -> int:
        """Tokens of the answer of one sibling in group number `index`."""
        return self.draw(random.Random(f"{self.seed}/{index}/{sibling}"))


def log_normal_with_tail(*, median: float, sigma: float, cap: int, tail: float = 0.03) -> LengthDraw:
    """97% log-normal lengths, and a `tail` of them between 0.9 and 1.0 of the cap.

    Args:
        sigma: standard deviation of the logarithm.
    """

    def draw(random: random.Random) -> int:
        if random.random() < tail:
            return round(cap * random.uniform(0.9, 1.0))
        return min(cap, max(1, round(median * random.lognormvariate(0.0, sigma))))

    return draw


def equal(length: int) -> LengthDraw:
    return lambda random: length

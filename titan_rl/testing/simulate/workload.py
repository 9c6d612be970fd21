"""How long answers are."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from titan_rl.core.errors import ConfigError

LengthDraw = Callable[[random.Random], int]


@dataclass(frozen=True, slots=True)
class Workload:
    """Single-turn prompts with answers whose lengths are a function of seed, group and sibling alone, so that every
    schedule gets the same ones.

    Args:
        draw: tokens of an answer.
        group_size: answers to a prompt, at least 2: those of a group are compared.

    Raises:
        ConfigError: names the field, the value and what is allowed.
    """

    draw: LengthDraw
    group_size: int
    prompt_tokens: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in {"group_size": 2, "prompt_tokens": 1}.items():
            if getattr(self, name) < least:
                raise ConfigError(f"Workload.{name} is {getattr(self, name)!r}; it must be at least {least}")

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

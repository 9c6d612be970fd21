"""Samples of alphabet-sort: the names of each turn, drawn for training or held out.

A conversation is held out if each of its cumulative lists, taken as a set of names, hashes into the held-out part; a
training conversation has no such list. So validation never asks to sort a list of names that was trained on, for
any seed.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

SortKey = Literal["first", "last"]

# Unsorted, so that the first names of the list are spread over the alphabet.
FIRST_NAMES = """
    Mia Ben Tara Hugo Lena Omar Clara Simon Ada Pia Victor Jonas Greta Noah Yara Felix Ruth Elias Kim Dora Igor Wanda
    Quinn Zoe Amir Oscar Bella Peter Hanna Liam Sofia Carl Nina Robin Eva Tom Julia Max Iris David Uma Frida Kurt Gina
    Leo Maya Stefan Vera Adam Rosa Henry Tilda Bruno Nadia Erik Paula Ivan Cora Jasper Lucy Ralf Dana Otto Selma
""".split()  # noqa: SIM905
LAST_NAMES = """
    Novak Fisher Stone Baker Wolf Hill Rossi Evans Lopez Young Chen Patel Garcia Khan Moore Adams Dahl Ito Turner
    Quist Jones Usher Vogel Zimmer Abbott Silva Brown Tanaka Cohen Weber Diaz Harris Ford Klein Green Mason Hughes
    Larsen Ibsen Price James Owen Katz Reed North Sato Ellis Underhill Ortega Varga Lind Walsh Burke Bishop Marsh
    Carter Perez Dixon Gray Hart Foster Nolan Rivera Scott
""".split()  # noqa: SIM905

HELD_OUT_SHARE = 0.2
"""Share of all sets of names that only validation sees."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One conversation.

    Example:

        sample = Sample("last", (("AdaWolf", "BenHill"), ("MiaKhan",)))
        sample.answer(0)  # ["BenHill", "AdaWolf"]
        sample.answer(1)  # ["BenHill", "MiaKhan // new name!", "AdaWolf"]
    """

    sort_by: SortKey
    turns: tuple[tuple[str, ...], ...]  # the names that each turn brings, as shown

    def answer(self, turn: int) -> list[str]:
        """Right lines of turn `turn`, counted from 0."""
        return tagged(sort_names(self.names(turn), self.sort_by), self.new_names(turn))

    def names(self, turn: int) -> list[str]:
        """All names that turn `turn` asks to sort: its own and those of earlier turns."""
        return [name for brought in self.turns[: turn + 1] for name in brought]

    def new_names(self, turn: int) -> tuple[str, ...]:
        """Names to tag in turn `turn`; none in the first turn."""
        return self.turns[turn] if turn else ()


def tagged(names: Iterable[str], new_names: Sequence[str]) -> list[str]:
    return [f"{name} // new name!" if name in new_names else name for name in names]


def sort_names(names: Iterable[str], sort_by: SortKey) -> list[str]:
    """Sort full names by first or last name, and equal ones by the other name."""

    def key(name: str) -> tuple[str, str]:
        first, last = re.findall("[A-Z][a-z]*", name)
        return (first, last) if sort_by == "first" else (last, first)

    return sorted(names, key=key)


@cache
def name_pool(size: int) -> tuple[str, ...]:
    """Full names for conversations. Each first and each last name appears about twice, so that ties occur.
    # [size]"""
    count = (size + 1) // 2
    pairs = [first + last for first in FIRST_NAMES[:count] for last in LAST_NAMES[:count]]
    return tuple(random.Random(size).sample(pairs, size))


def is_held_out(names: Iterable[str]) -> bool:
    """Whether this set of names belongs to validation."""
    digest = hashlib.blake2b("\n".join(sorted(names)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < HELD_OUT_SHARE * 2**64


def draw_turns(
    rng: random.Random, pool: Sequence[str], sizes: Sequence[tuple[int, int]], *, held_out: bool
) -> tuple[tuple[str, ...], ...]:
    """Draw the names of each turn, so that every cumulative list is held out, or none is.

    Args:
        sizes: Smallest and largest number of names of each turn.

    Raises:
        ValueError: No such conversation was found.
    """
    for _ in range(1000):
        turns = _try_turns(rng, pool, sizes, held_out)
        if turns is not None:
            return turns
    side = "held-out" if held_out else "training"
    raise ValueError(f"no {side} conversation found with {len(pool)} names and turns of {list(sizes)}; use more names")


def _try_turns(
    rng: random.Random, pool: Sequence[str], sizes: Sequence[tuple[int, int]], held_out: bool
) -> tuple[tuple[str, ...], ...] | None:
    seen: list[str] = []
    turns: list[tuple[str, ...]] = []
    for least, most in sizes:
        fresh = [name for name in pool if name not in seen]
        for _ in range(50):
            drawn = rng.sample(fresh, rng.randint(least, most))
            if is_held_out(seen + drawn) == held_out:
                break
        else:
            return None
        seen += drawn
        turns.append(tuple(drawn))
    return tuple(turns)

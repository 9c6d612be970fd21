"""Turns by weight: nobody is ever a whole turn ahead of its share, or behind."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction


class Shares:
    """Says whose turn is next, without chance: earliest eligible virtual deadline first.

    After n turns each has had its share of n, give or take less than one. A turn of a name with share w is due from
    k/w to (k+1)/w, for its k-th; of those that are due, the one that is soonest over goes first.

    Example: weights of 2 and 1 give a, a, b, a, a, b, ...

    Args:
        weights: by name, positive.
        taken: turns that each has had with these weights.
    """

    def __init__(self, weights: Mapping[str, float], taken: Mapping[str, int] | None = None) -> None:
        exact = {name: Fraction(weight) for name, weight in weights.items()}
        total = sum(exact.values())
        self._shares = {name: weight / total for name, weight in exact.items()}
        self.taken = dict.fromkeys(weights, 0) | dict(taken or {})

    def of(self, name: str) -> Fraction:
        """Its share of the turns, of 1."""
        return self._shares[name]

    def next(self) -> str:
        """Whose turn it is."""
        turn = sum(self.taken.values())
        due = [name for name, share in self._shares.items() if self.taken[name] < share * (turn + 1)]
        return min(due, key=lambda name: (self.taken[name] + 1) / self._shares[name])

    def take(self, name: str) -> None:
        """It has had a turn."""
        self.taken[name] += 1

"""Kuhn poker (H. W. Kuhn, "A simplified two-person poker", 1950), as a tree of histories.

Each of two players antes a chip and is dealt one of three cards. In turn they pass or bet a chip: two passes show the
cards, so do a bet and another, and a pass after a bet folds.

Example: `chips(("king", "jack"), ("pass", "bet", "bet"))` is 2: the first player, who has called, wins two chips.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations

CARDS = ("jack", "queen", "king")  # lowest first
SEATS = ("first", "second")
ACTIONS = ("pass", "bet")

Cards = tuple[str, str]
"""Card of each seat."""
History = tuple[str, ...]
"""Actions so far."""

DEALS: Sequence[Cards] = tuple((first, second) for first, second in permutations(CARDS, 2))


def to_act(history: History) -> str:
    return SEATS[len(history) % 2]


def is_over(history: History) -> bool:
    return history[-2:] in {("pass", "pass"), ("bet", "pass"), ("bet", "bet")}


def chips(cards: Cards, history: History) -> int:
    """Chips that the first seat wins at the end of a hand, and the second seat loses."""
    if history[-2:] == ("bet", "pass"):
        return 1 if to_act(history) == "first" else -1  # the seat that bet would act next
    stake = 2 if history[-1] == "bet" else 1
    return stake if CARDS.index(cards[0]) > CARDS.index(cards[1]) else -stake


def histories(history: History = ()) -> Iterator[History]:
    """Yield all histories from this one on at which a seat has to act."""
    if not is_over(history):
        yield history
        for action in ACTIONS:
            yield from histories((*history, action))

"""The words and phrases of some texts that are worth a token. Standard library only."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Literal

Level = Literal["byte", "word"]

MOST_WORDS = 8192
SELDOM = 10
"""A phrase occurs this often at least, and in as many texts as one of so many."""

Piece = str
Place = tuple[int, int]
"""The number of a text, and of a piece in it."""


def frequent_words(pieces: Sequence[Sequence[Piece]]) -> list[Piece]:
    """The words, the most frequent first. A single character is a byte or some anyway.  # at most [MOST_WORDS]"""
    counts = Counter(piece for text in pieces for piece in text if len(piece) > 1)
    return [word for word, _ in counts.most_common(MOST_WORDS)]


def fixed_phrases(pieces: Sequence[Sequence[Piece]]) -> list[Piece]:
    """Runs of pieces with two words at least that always go on alike, as those of an instruction do.

    A run begins with a piece, and goes on as long as each occurrence of it is followed by the same piece.

    Args:
        pieces: of each text: words, and single characters of anything else.

    Example: of "What is 3 + 4?", "What is 2 + 9?" and more of their kind, "What is " is one.
    """
    places: dict[Piece, list[Place]] = defaultdict(list)
    for number, text in enumerate(pieces):
        for at, piece in enumerate(text):
            places[piece].append((number, at))
    least = max(SELDOM, len(pieces) / SELDOM)
    runs: list[Sequence[Piece]] = []
    within: dict[Place, int] = {}  # in the first occurrence of each run: how often that occurs
    for occurrences in places.values():  # in the order of the first ones, so that a run comes before its parts
        number, at = occurrences[0]
        if len(occurrences) < least or within.get((number, at)) == len(occurrences):
            continue
        length = _length(pieces, occurrences)
        within |= {(number, at + offset): len(occurrences) for offset in range(length)}
        runs.append(pieces[number][at : at + length])
    return ["".join(run) for run in runs if sum(piece[0].isalpha() for piece in run) > 1]


def _length(pieces: Sequence[Sequence[Piece]], occurrences: Sequence[Place]) -> int:
    """Of the run that begins with each of these places."""
    length = 1
    while None not in (following := _after(pieces, occurrences, length)) and len(following) == 1:
        length += 1
    return length


def _after(pieces: Sequence[Sequence[Piece]], occurrences: Sequence[Place], offset: int) -> set[Piece | None]:
    """What stands so far behind each occurrence; None for the end of a text."""
    return {pieces[number][at + offset] if at + offset < len(pieces[number]) else None for number, at in occurrences}

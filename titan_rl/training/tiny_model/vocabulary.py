"""The words and phrases of some texts that are worth a token. Standard library only."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Literal

Level = Literal["byte", "word"]

MOST_WORDS = 8192
SELDOM = 10
"""A phrase occurs this often at least, and as often as there are texts, divided by this."""

SEED = 3
"""Pieces, at most, that say which run has begun."""

Piece = str
Seed = tuple[Piece, ...]
Place = tuple[int, int]
"""The number of a text, and of a piece in it."""


def frequent_words(pieces: Sequence[Sequence[Piece]]) -> list[Piece]:
    """The words, the most frequent first. A single character is a byte or some anyway.  # at most [MOST_WORDS]"""
    counts = Counter(piece for text in pieces for piece in text if len(piece) > 1)
    return [word for word, _ in counts.most_common(MOST_WORDS)]


def fixed_phrases(pieces: Sequence[Sequence[Piece]], num_texts: int) -> list[Piece]:
    """Runs of pieces that always go on alike, as those of an instruction do.

    A run begins with up to `SEED` pieces, and goes on as long as each occurrence of it is followed by the same piece.
    One whose rest also stands behind something else is left out: the rest is fixed, and a name before it is not.

    Args:
        pieces: of each part of a text: words, and single characters of anything else.
        num_texts: that they are parts of.

    Example: of "What is 3 + 4?", "What is 2 + 9?" and more of their kind, "What is " is one.
    """
    least = max(SELDOM, num_texts / SELDOM)
    places = _seeds(pieces)
    runs: list[Sequence[Piece]] = []
    within: set[tuple[Place, int]] = set()  # of the first occurrence of each run, with how often that occurs
    for seed in sorted((seed for seed in places if len(places[seed]) >= least), key=lambda seed: places[seed][0]):
        occurrences = places[seed]
        number, at = occurrences[0]
        if ((number, at), len(occurrences)) in within:
            continue
        length = _length(pieces, occurrences, len(seed))
        run = pieces[number][at : at + length]
        if length < len(seed) + 2 or _count(pieces, places, run[1:]) > len(occurrences):
            continue
        within |= {((number, at + offset), len(occurrences)) for offset in range(length)}
        runs.append(run)
    return list(dict.fromkeys("".join(run) for run in runs))


def _count(pieces: Sequence[Sequence[Piece]], places: Mapping[Seed, Sequence[Place]], run: Sequence[Piece]) -> int:
    begun = places[tuple(run[:SEED])]
    return sum(pieces[number][at : at + len(run)] == run for number, at in begun)


def _seeds(pieces: Sequence[Sequence[Piece]]) -> dict[Seed, list[Place]]:
    """Where the first pieces of a run may be, the shortest first."""
    places: dict[Seed, list[Place]] = defaultdict(list)
    for length in range(1, SEED + 1):
        for number, text in enumerate(pieces):
            for at in range(len(text) - length + 1):
                places[tuple(text[at : at + length])].append((number, at))
    return places


def _length(pieces: Sequence[Sequence[Piece]], occurrences: Sequence[Place], length: int) -> int:
    """Of the run that begins with each of these places, and has so many pieces at least."""
    while None not in (following := _after(pieces, occurrences, length)) and len(following) == 1:
        length += 1
    return length


def _after(pieces: Sequence[Sequence[Piece]], occurrences: Sequence[Place], offset: int) -> set[Piece | None]:
    """What stands so far behind each occurrence; None for the end of a text."""
    return {pieces[number][at + offset] if at + offset < len(pieces[number]) else None for number, at in occurrences}

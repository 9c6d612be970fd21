"""Packs families of unequal length into rows, so that little of a batch is padding. Standard library only.

Best-fit decreasing (Johnson, 1973): the longest first, each into the fullest row that still has room. Rows are
then levelled: the same number of rows is packed again with the least capacity that holds, because a batch is padded
to its longest row. Where ranks share the rows and best fit leaves one without, rows are split until each has its own:
between families, and where a row is one family, between its samples, whose prefix is then computed in both.

What holds of every packing: each sample is in one row or dropped, with its family unless that had to be split; no row
exceeds the capacity; a family is dropped only where it is longer than a row; of two rows or more for one rank, the
mean row is over half the capacity; the rows are a multiple of the ranks, unless there are fewer samples than that.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from titan_rl.training.data.family import Family


@dataclass(frozen=True, slots=True)
class Packing:
    """Families of samples laid out in rows. Positions restart with each, attention stays inside it.

    Example: families of 5, 3 and 9 tokens, rows of 8: `Packing(rows=[[five, three]], dropped=[nine])`.
    """

    rows: list[list[Family]]  # no row is empty
    dropped: list[Family]  # longer than a row

    @property
    def row_lengths(self) -> list[int]:
        return [_length(row) for row in self.rows]

    @property
    def padding_fraction(self) -> float:
        """The share of padding when every row is as long as the longest."""
        lengths = self.row_lengths
        return 1 - sum(lengths) / (len(lengths) * max(lengths)) if lengths else 0.0


def pack(families: Sequence[Family], row_tokens: int, *, multiple_of: int = 1) -> Packing:
    """Pack families into as few rows as best-fit decreasing needs. The same input gives the same rows.

    Args:
        row_tokens: the most tokens in one row.
        multiple_of: so many ranks share the rows. Where there are samples enough, each rank gets as many rows, which
            are then shorter, so that no rank idles while others compute. The longest rows come first then.
    """
    assert all(family.num_tokens for family in families), "a family has no tokens"
    fitting = [family for family in families if family.num_tokens <= row_tokens]
    dropped = [family for family in families if family.num_tokens > row_tokens]
    fitting.sort(key=lambda family: family.num_tokens, reverse=True)
    rows = _best_fit(fitting, row_tokens)
    if rows:
        most = min(sum(len(family.samples) for family in fitting), len(rows) + -len(rows) % multiple_of)
        mean = -(-sum(family.num_tokens for family in fitting) // most)
        low, high = max(mean, fitting[0].num_tokens), row_tokens
        while low < high:
            middle = (low + high) // 2
            levelled = _best_fit(fitting, middle)
            if len(levelled) <= most:
                rows, high = levelled, middle
            else:
                low = middle + 1
        if len(rows) < most:
            ways = [_emptiest_first(fitting, most)] if len(fitting) >= most else []
            ways.append(_split(rows, most))
            rows = min(ways, key=lambda rows: max(map(_length, rows)))
            rows.sort(key=_length, reverse=True)  # those of a micro-batch are neighbours
    return Packing(rows, dropped)


def _split(rows: Sequence[list[Family]], count: int) -> list[list[Family]]:
    """The longest rows in halves, until there are `count`, which is at most one for each sample."""
    rows = list(rows)
    while len(rows) < count:
        longest = max((row for row in rows if sum(len(family.samples) for family in row) > 1), key=_length)
        rows.remove(longest)
        if len(longest) > 1:
            rows += _emptiest_first(sorted(longest, key=lambda family: family.num_tokens, reverse=True), 2)
        else:
            rows += [[half] for half in longest[0].halves()]
    return rows


def _emptiest_first(families: Sequence[Family], count: int) -> list[list[Family]]:
    """`count` rows of at least as many families, which come longest first; each goes into the row that has least."""
    rows: list[list[Family]] = [[] for _ in range(count)]
    lengths = [(0, index) for index in range(count)]
    for family in families:
        length, index = heappop(lengths)
        rows[index].append(family)
        heappush(lengths, (length + family.num_tokens, index))
    return rows


def _length(row: Sequence[Family]) -> int:
    return sum(family.num_tokens for family in row)


def _best_fit(families: Sequence[Family], capacity: int) -> list[list[Family]]:
    """Rows of `families`, which come longest first and are no longer than `capacity`."""
    rows: list[list[Family]] = []
    free: list[tuple[int, int]] = []  # (tokens left, row), sorted
    for family in families:
        length = family.num_tokens
        place = bisect_left(free, (length, 0))
        if place < len(free):
            left, row = free.pop(place)
            rows[row].append(family)
        else:
            left, row = capacity, len(rows)
            rows.append([family])
        insort(free, (left - length, row))
    return rows

"""Packing of samples into rows: families of samples that share a prefix, and rows of families.

The siblings of a group share their prompt. A `Family` is one prefix followed by a suffix for each sibling, so that the
prompt goes through the model once instead of `group_size` times. The last token before the first trained one stays with
each suffix, because its output predicts another token in each. Invariant: a token is in the prefix only if every sample
of the family begins with it, none trains it, and it predicts no trained token.

Rows are packed by best-fit decreasing (Johnson, 1973): the longest first, each into the fullest row that still has
room. Rows are then levelled: the families are packed again into the same number of rows with the smallest capacity that
is enough, because a batch is padded to its longest row. If ranks share the rows and best fit leaves a rank without one,
rows are split until each rank has its own: between families or, if a row is one family, between its samples, whose
prefix is then computed in both rows.

Invariants of every packing: each sample is in one row or dropped, together with its family unless that had to be split;
no row exceeds the capacity; a family is dropped only if it is longer than a row; with a single rank and two rows or
more, the mean row is over half the capacity; the number of rows is a multiple of the number of ranks, unless there are
fewer samples than ranks.

This file imports no torch: the controller plans, and the ranks compute. `step_plan.py` assigns the rows to ranks.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from titan_rl.core.arrays import common_length, token_array
from titan_rl.training.data.sample import TrainingSample

SHORTEST = 8
"""Shortest prefix that is shared. For shorter ones, the longer attention of the suffixes costs more than it saves."""

LONGEST = 4096
"""Longest sample that shares a prefix. Longer ones are laid out alone: the mask of a suffix over its prefix costs the
product of their lengths."""


@dataclass(frozen=True, slots=True)
class Family:
    """Samples of one group that share their first `prefix_length` tokens. A family of one sample has no prefix.

    Example: the prompt [7, 8, 9, 5] with the answers [1, 2] and [3] is the prefix [7, 8, 9] and the suffixes
    [5, 1, 2] and [5, 3]: 8 tokens instead of 11.
    """

    samples: tuple[TrainingSample, ...]
    prefix_length: int = 0

    @property
    def num_tokens(self) -> int:
        return self.prefix_length + sum(len(sample.token_ids) - self.prefix_length for sample in self.samples)

    def halves(self) -> tuple[Family, Family]:
        """Split a family of two samples or more into two of similar length, both with the prefix."""
        parts: tuple[list[TrainingSample], list[TrainingSample]] = ([], [])
        for sample in sorted(self.samples, key=lambda sample: len(sample.token_ids), reverse=True):
            min(parts, key=lambda part: sum(len(s.token_ids) - self.prefix_length for s in part)).append(sample)
        return _family(parts[0], self.prefix_length), _family(parts[1], self.prefix_length)


def find_families(samples: Iterable[TrainingSample], row_tokens: int) -> list[Family]:
    """Join the samples of each group that share a prefix. No family of several samples is longer than `row_tokens`."""
    by_group: dict[str, list[TrainingSample]] = {}
    for sample in samples:
        by_group.setdefault(sample.group_id, []).append(sample)
    return [family for siblings in by_group.values() for family in _join(siblings, row_tokens)]


def _join(siblings: Sequence[TrainingSample], row_tokens: int) -> list[Family]:
    short = [sample for sample in siblings if len(sample.token_ids) <= min(row_tokens, LONGEST)]
    prefix_length = _shared(short) if len(short) > 1 else 0
    if prefix_length < SHORTEST:
        return [Family((sample,)) for sample in siblings]
    families = [Family((sample,)) for sample in siblings if len(sample.token_ids) > min(row_tokens, LONGEST)]
    joined: list[TrainingSample] = []
    for sample in short:
        if joined and Family((*joined, sample), prefix_length).num_tokens > row_tokens:
            families.append(_family(joined, prefix_length))
            joined = []
        joined.append(sample)
    return [*families, _family(joined, prefix_length)]


def _family(samples: Sequence[TrainingSample], prefix_length: int) -> Family:
    return Family(tuple(samples), prefix_length if len(samples) > 1 else 0)


def _shared(samples: Sequence[TrainingSample]) -> int:
    first = token_array(samples[0].token_ids)[: min(map(_num_untrained, samples))]
    for sample in samples[1:]:
        first = first[: common_length(first, token_array(sample.token_ids))]
    return len(first)


def _num_untrained(sample: TrainingSample) -> int:
    """Number of tokens at the start that are not trained and predict no trained token."""
    try:
        first_trained = sample.loss_mask.index(True)
    except ValueError:
        first_trained = len(sample.token_ids)
    return max(0, first_trained - 1)


@dataclass(frozen=True, slots=True)
class Packing:
    """Families of samples laid out in rows. Positions restart with each sample, and attention stays inside it.

    Example: families of 5, 3 and 9 tokens, rows of 8: `Packing(rows=[[five, three]], dropped=[nine])`.
    """

    rows: list[list[Family]]  # no row is empty
    dropped: list[Family]  # longer than a row


def pack(families: Sequence[Family], row_tokens: int, *, multiple_of: int = 1) -> Packing:
    """Pack families into as few rows as best-fit decreasing needs. The same input gives the same rows.

    Args:
        row_tokens: Maximum number of tokens of a row.
        multiple_of: Number of ranks that share the rows. If there are enough samples, all ranks get the same number of
            rows, so that none idles; the rows may then be shorter, and the longest come first.
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
            rows.sort(key=_length, reverse=True)  # rows of similar length share a micro-batch
    return Packing(rows, dropped)


def _split(rows: Sequence[list[Family]], count: int) -> list[list[Family]]:
    """Split the longest rows in halves until there are `count`, which is at most the number of samples."""
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
    """Distribute at least `count` families, longest first, over `count` rows; each goes into the shortest row."""
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
    """Pack families into rows. They must come longest first, and none may be longer than `capacity`."""
    rows: list[list[Family]] = []
    free: list[tuple[int, int]] = []  # (tokens left, row), sorted
    for family in families:
        length = family.num_tokens
        index = bisect_left(free, (length, 0))
        if index < len(free):
            left, row = free.pop(index)
            rows[row].append(family)
        else:
            left, row = capacity, len(rows)
            rows.append([family])
        insort(free, (left - length, row))
    return rows

"""Samples that begin alike, so that what they begin with is computed once.

The siblings of a group share their prompt. Laid out as one prefix and a suffix for each of them, the prompt goes
through the model once instead of `group_size` times. The last token before the first trained one stays with each
suffix, because its output differs in what it predicts.

What holds: a token is in the prefix only if every sample of the family begins with it, none trains it, and it predicts
no trained token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from titan_rl.core.arrays import common_length, token_array
from titan_rl.training.data.sample import TrainingSample

SHORTEST = 8
"""Prefixes below this many tokens are not worth a suffix's longer attention."""

LONGEST = 4096
"""Samples above this many tokens are laid out alone: the mask of a suffix over its prefix costs their product."""


@dataclass(frozen=True, slots=True)
class Family:
    """Samples of one group that share their first `prefix_length` tokens. One alone shares none.

    Example: the prompt [7, 8, 9, 5] with the answers [1, 2] and [3] is the prefix [7, 8, 9] and the suffixes
    [5, 1, 2] and [5, 3]: 8 tokens instead of 11.
    """

    samples: tuple[TrainingSample, ...]
    prefix_length: int = 0

    @property
    def num_tokens(self) -> int:
        return self.prefix_length + sum(len(sample.token_ids) - self.prefix_length for sample in self.samples)

    def halves(self) -> tuple[Family, Family]:
        """Two families of its samples, nearly as long as each other. The prefix is in both. Of two samples or more."""
        parts: tuple[list[TrainingSample], list[TrainingSample]] = ([], [])
        for sample in sorted(self.samples, key=lambda sample: len(sample.token_ids), reverse=True):
            min(parts, key=lambda part: sum(len(s.token_ids) - self.prefix_length for s in part)).append(sample)
        return _family(parts[0], self.prefix_length), _family(parts[1], self.prefix_length)


def find_families(samples: Iterable[TrainingSample], row_tokens: int) -> list[Family]:
    """Join the samples of each group that begin alike. No family of several is longer than a row."""
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
    """Tokens at the start that are neither trained nor predict one that is."""
    try:
        first_trained = sample.loss_mask.index(True)
    except ValueError:
        first_trained = len(sample.token_ids)
    return max(0, first_trained - 1)

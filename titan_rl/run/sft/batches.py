"""Which demonstrations each step learns. Standard library only."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import islice

HELD_OUT_SHARE = 10
"""At most one of so many demonstrations is held out."""


def hold_out(count: int, most: int, seed: int) -> tuple[list[int], list[int]]:
    """The demonstrations that are learned and those that are not, each in order.

    Args:
        count: of all.
        most: that are held out.
    """
    held = set(random.Random(f"{seed}/held out").sample(range(count), min(most, count // HELD_OUT_SHARE)))
    return [at for at in range(count) if at not in held], sorted(held)


def batches(
    items: Sequence[int],
    *,
    batch_size: int,
    steps: int | None,
    epochs: int,
    shuffle: bool,
    seed: int,
    lengths: Sequence[int] | None = None,
    batch_tokens: int = 0,
) -> list[list[int]]:
    """What each step learns; the same arguments give the same.

    Args:
        items: of one epoch, in the order of their source.
        batch_size: items in one step. One may be there twice where there are fewer.
        steps: so many, through as many epochs as that takes; else those of `epochs`, of which the last step may have
            fewer items.
        lengths: tokens of each item, by which steps are as long as `batch_tokens` allows, in place of `batch_size`.
    """
    stream = _stream(items, epochs if steps is None else None, shuffle, seed)
    cut = _by_number(stream, batch_size) if lengths is None else _by_tokens(stream, lengths, batch_tokens)
    return list(islice(cut, steps))


def _stream(items: Sequence[int], epochs: int | None, shuffle: bool, seed: int) -> Iterator[int]:
    epoch = 0
    while epochs is None or epoch < epochs:
        yield from random.Random(f"{seed}/{epoch}").sample(items, len(items)) if shuffle else items
        epoch += 1


def _by_number(stream: Iterator[int], batch_size: int) -> Iterator[list[int]]:
    while batch := list(islice(stream, batch_size)):
        yield batch


def _by_tokens(stream: Iterator[int], lengths: Sequence[int], most: int) -> Iterator[list[int]]:
    batch: list[int] = []
    tokens = 0
    for item in stream:
        if batch and tokens + lengths[item] > most:
            yield batch
            batch, tokens = [], 0
        batch.append(item)
        tokens += lengths[item]
    if batch:
        yield batch

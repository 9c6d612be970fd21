"""Windowed first-in-first-out: which finished groups make the next batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable


def choose(waiting: Iterable[int], is_ready: Callable[[int], bool], *, size: int, window: int) -> list[int]:
    """Up to `size` groups that are ready, the oldest first, overtaking by fewer than `window` places.

    Groups go by their position in the data. Over all batches together, a group is overtaken by at most `window - 1`
    others: only those less than `window` positions behind the oldest that waits may go before it.

    Args:
        waiting: positions of the groups admitted and neither trained nor dropped, in ascending order.

    Example: group 4 is not ready; with a window of 3 only 5 and 6 may overtake it.

        choose([4, 5, 6, 7], lambda index: index > 4, size=3, window=3)   # [5, 6]
    """
    chosen: list[int] = []
    oldest: int | None = None  # of those that stay
    for index in waiting:
        if len(chosen) == size or (oldest is not None and index - oldest >= window):
            break
        if is_ready(index):
            chosen.append(index)
        elif oldest is None:
            oldest = index
    return chosen

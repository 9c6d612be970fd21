"""In which order groups are trained on, where there are several tasks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class TrainingOrder(Protocol):
    """Says whose turn it is to be trained on. A batch takes the first turns, and a group of its task for each.

    A turn is dealt when a group is admitted, and stays when that group is dropped: the next one to be admitted is for
    the first turn that has none. So there are never more turns than slots, and with data order within each task a group
    is trained on no later than the turn it was admitted for.
    """

    def admitted(self, index: int) -> None:
        """The group at a position in the data has a slot."""
        ...

    def next_restored(self) -> int | None:
        """The group of an earlier run to be admitted next: that of the first turn without an admitted group. None where
        that turn is free, or there are none: a group that has no turn yet is admitted then.

        So no group is admitted that has as many turns before it as there are slots.
        """
        ...

    def task_of(self, index: int) -> str | None:
        """Of a group that is admitted and neither trained nor dropped."""
        ...

    def place_of(self, index: int) -> int:
        """Of such a group, among all that its task has had."""
        ...

    def turns(self, count: int) -> Sequence[str]:
        """The tasks of the next `count` groups to be trained on, or of as many as have a turn, the next one first,
        without those that are in a batch."""
        ...

    def turns_before(self, task: str, number: int) -> int:
        """How many of those turns come before one of the task that has `number` of the same before it."""
        ...

    def batched(self, indices: Sequence[int]) -> None:
        """The groups are in a batch."""
        ...

    def window(self, task: str, window: int) -> int:
        """By fewer places of its task than this a finished group overtakes an unfinished one, so that this one is moved
        by fewer than `window` turns."""
        ...

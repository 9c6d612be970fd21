"""The turns that were dealt to tasks, and which of them have a group."""

from __future__ import annotations

import bisect
import heapq
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from itertools import islice, repeat


class TaskTurns:
    """Each is for one group of a task to be trained on, in the order in which they were dealt. Within a task the first
    turns are those of the groups that there are, and of these the first are those of the groups that are in a batch.

    Dealing one, filling it and taking it is O(1) in their number.

    Args:
        tasks: of turns that have no groups yet, the next one first.
        num_old: of these, dealt with other weights.
    """

    def __init__(self, tasks: Iterable[str] = (), num_old: int = 0) -> None:
        self._of_task: defaultdict[str, deque[int]] = defaultdict(deque)  # their numbers, ascending
        self._num_filled: defaultdict[str, int] = defaultdict(int)
        self._num_batched: defaultdict[str, int] = defaultdict(int)
        self._dealt = self._old_before = 0  # so many; those with a number below this are old
        self.num_old = num_old
        for task in tasks:
            self._of_task[task].append(self._dealt)
            self._dealt += 1
        self._old_before = num_old

    def __len__(self) -> int:
        return sum(map(len, self._of_task.values()))

    def deal(self, task: str) -> None:
        """Another one, which has a group."""
        self._of_task[task].append(self._dealt)
        self._dealt += 1
        self._num_filled[task] += 1

    def fill(self, task: str) -> bool:
        """A turn of the task gets a group, if one is free."""
        is_free = self._num_filled[task] < len(self._of_task[task])
        self._num_filled[task] += is_free
        return is_free

    def free(self, task: str, *, in_batch: bool) -> None:
        """The group of one was dropped."""
        self._num_filled[task] -= 1
        self._num_batched[task] -= in_batch

    def first_free(self, without: Mapping[str, int] | None = None) -> str | None:
        """The task of the first turn that has no group.

        Args:
            without: by task, so many of its last groups are not counted.
        """
        free = [
            (numbers[filled], task)
            for task, numbers in self._of_task.items()
            if (filled := self._num_filled[task] - (without or {}).get(task, 0)) < len(numbers)
        ]
        return min(free)[1] if free else None

    def batched(self, task: str) -> None:
        """The group of one is in a batch."""
        self._num_batched[task] += 1

    def take(self, task: str, *, in_batch: bool) -> None:
        """The group of one was trained on."""
        number = self._of_task[task].popleft()
        self.free(task, in_batch=in_batch)
        self.num_old -= number < self._old_before

    def become_old(self) -> None:
        """Those that there are were dealt with other weights."""
        self.num_old, self._old_before = len(self), self._dealt

    def next(self, count: int) -> list[str]:
        """The tasks of the first `count` that are not in a batch, or of as many as there are."""
        return self._merged(self._num_batched, count)

    def before(self, task: str, number: int) -> int:
        """Turns not in a batch that come before a task's turn that has so many of the same before it."""
        turn = self._of_task[task][self._num_batched[task] + number]
        return sum(
            bisect.bisect_left(numbers, turn) - self._num_batched[other] for other, numbers in self._of_task.items()
        )

    def all(self) -> list[str]:
        """The tasks of all."""
        return self._merged({}, len(self))

    def _merged(self, left_out: Mapping[str, int], count: int) -> list[str]:
        of_tasks = (
            zip(islice(numbers, left_out.get(task, 0), None), repeat(task), strict=False)
            for task, numbers in self._of_task.items()
        )
        return [task for _, task in islice(heapq.merge(*of_tasks), count)]

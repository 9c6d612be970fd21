"""Turns of tasks: whose turn is dealt next, by weight, and which dealt turns have a group."""

from __future__ import annotations

import bisect
import heapq
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from fractions import Fraction
from itertools import islice, repeat


class Shares:
    """Deterministic share of turns by weight: earliest eligible virtual deadline first.

    After n turns each name has had its share of n, within one turn. The k-th turn of a name with share w is eligible
    from turn k/w on, with its deadline at (k+1)/w.

    Example: weights of 2 and 1 give a, a, b, a, a, b, ...

    Args:
        weights: by name, positive.
        taken: turns that each name has had with these weights.
    """

    def __init__(self, weights: Mapping[str, float], taken: Mapping[str, int] | None = None) -> None:
        exact = {name: Fraction(weight) for name, weight in weights.items()}
        total = sum(exact.values())
        self._shares = {name: weight / total for name, weight in exact.items()}
        self.taken = dict.fromkeys(weights, 0) | dict(taken or {})

    def of(self, name: str) -> Fraction:
        """Share of a name in the turns, from 0 to 1."""
        return self._shares[name]

    def next(self) -> str:
        """Name whose turn is next."""
        turn = sum(self.taken.values())
        due = [name for name, share in self._shares.items() if self.taken[name] < share * (turn + 1)]
        return min(due, key=lambda name: (self.taken[name] + 1) / self._shares[name])

    def take(self, name: str) -> None:
        """Count a turn of a name."""
        self.taken[name] += 1


class TaskTurns:
    """Dealt turns in order, each for one group of a task to be trained on. Within a task, the first turns belong to the
    groups in a batch, the next ones to the other groups; the rest are free.

    Dealing, filling and taking a turn is O(1) in their number.

    Args:
        tasks: tasks of the initial turns, which have no groups yet, the next turn first.
        num_old: number of initial turns that were dealt with other weights.
    """

    def __init__(self, tasks: Iterable[str] = (), num_old: int = 0) -> None:
        self._of_task: defaultdict[str, deque[int]] = defaultdict(deque)  # numbers of the turns, ascending
        self._num_filled: defaultdict[str, int] = defaultdict(int)
        self._num_batched: defaultdict[str, int] = defaultdict(int)
        self._dealt = self._old_before = 0  # turns dealt; turns with a number below `_old_before` are old
        self.num_old = num_old
        for task in tasks:
            self._of_task[task].append(self._dealt)
            self._dealt += 1
        self._old_before = num_old

    def __len__(self) -> int:
        return sum(map(len, self._of_task.values()))

    def deal(self, task: str) -> None:
        """Deal a turn that has a group."""
        self._of_task[task].append(self._dealt)
        self._dealt += 1
        self._num_filled[task] += 1

    def fill(self, task: str) -> bool:
        """Give a free turn of the task to a group; False if none is free."""
        is_free = self._num_filled[task] < len(self._of_task[task])
        self._num_filled[task] += is_free
        return is_free

    def free(self, task: str, *, in_batch: bool) -> None:
        """Free the turn of a dropped group."""
        self._num_filled[task] -= 1
        self._num_batched[task] -= in_batch

    def first_free(self, without: Mapping[str, int] | None = None) -> str | None:
        """Task of the first free turn.

        Args:
            without: number of last groups of each task that are not counted.
        """
        free = [
            (numbers[filled], task)
            for task, numbers in self._of_task.items()
            if (filled := self._num_filled[task] - (without or {}).get(task, 0)) < len(numbers)
        ]
        return min(free)[1] if free else None

    def batched(self, task: str) -> None:
        """Count a group of the task that is in a batch."""
        self._num_batched[task] += 1

    def take(self, task: str, *, in_batch: bool) -> None:
        """Remove the first turn of the task, whose group was trained on."""
        number = self._of_task[task].popleft()
        self.free(task, in_batch=in_batch)
        self.num_old -= number < self._old_before

    def become_old(self) -> None:
        """Mark all turns as dealt with other weights."""
        self.num_old, self._old_before = len(self), self._dealt

    def next(self, count: int) -> list[str]:
        """Tasks of the first `count` turns that are not in a batch, or of as many as there are."""
        return self._merged(self._num_batched, count)

    def before(self, task: str, number: int) -> int:
        """Number of turns before a task's turn, without those in a batch; `number` counts the task's own before it."""
        turn = self._of_task[task][self._num_batched[task] + number]
        return sum(
            bisect.bisect_left(numbers, turn) - self._num_batched[other] for other, numbers in self._of_task.items()
        )

    def all(self) -> list[str]:
        """Tasks of all turns."""
        return self._merged({}, len(self))

    def _merged(self, left_out: Mapping[str, int], count: int) -> list[str]:
        of_tasks = (
            zip(islice(numbers, left_out.get(task, 0), None), repeat(task), strict=False)
            for task, numbers in self._of_task.items()
        )
        return [task for _, task in islice(heapq.merge(*of_tasks), count)]

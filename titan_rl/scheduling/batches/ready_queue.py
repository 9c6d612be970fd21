"""Which finished groups may be trained on next, in time that does not grow with how many wait."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Set
from copy import copy
from typing import Self


class ReadyQueue:
    """Groups of one task, by their places in its order, that wait for a batch.

    A finished group may go next if it overtakes an unfinished one by fewer than `window` places: over all batches
    together, a group is overtaken by at most `window - 1` others. O(log groups) for whatever happens to one.

    Example: the groups at 4 to 7 wait, and all but 4 are finished. With a window of 3 only 5 and 6 may overtake it:

        queue.count(window=3)   # 2
        queue.first(2)          # their indices
    """

    def __init__(self) -> None:
        self._indices: dict[int, int] = {}  # place -> index in the data, of all that wait
        self._unfinished: list[int] = []  # heap of places; those that are no longer in `_open` count for nothing
        self._open = set[int]()  # unfinished places
        self._beyond: list[int] = []  # heap of finished places outside the window, when it was last looked at
        self._eligible = set[int]()  # finished places within it

    def add(self, place: int, index: int, version: int = 0) -> None:
        """A group is admitted, behind all before it.

        Args:
            version: the newest one pulled; never less than that of the group before.
        """
        self._indices[place] = index
        self._open.add(place)
        heapq.heappush(self._unfinished, place)

    def finish(self, place: int) -> None:
        self._open.discard(place)
        heapq.heappush(self._beyond, place)

    def remove(self, place: int) -> None:
        """The group is in a batch, or dropped."""
        del self._indices[place]
        self._open.discard(place)
        self._eligible.discard(place)

    def count(self, window: int) -> int:
        """Groups that may go next. The window never shrinks."""
        while self._unfinished and self._unfinished[0] not in self._open:
            heapq.heappop(self._unfinished)
        limit = self._unfinished[0] + window if self._unfinished else math.inf
        while self._beyond and self._beyond[0] < limit:
            place = heapq.heappop(self._beyond)
            if place in self._indices and place not in self._open:  # one that is generated again is open once more
                self._eligible.add(place)
        return len(self._eligible)

    def first(self, count: int) -> list[int]:
        """The indices of the first so many of those that `count` has counted, in order."""
        return [self._indices[place] for place in heapq.nsmallest(count, self._eligible)]

    def finished_but(self, places: Set[int]) -> Self:
        """What this queue is once all groups have finished but those at these places. O(groups)."""
        later = copy(self)
        vars(later).update({name: copy(value) for name, value in vars(self).items()})
        for place in self._open - places:
            later.finish(place)
        return later


class AgedQueue(ReadyQueue):
    """A finished group may go next if those that it overtakes can still be trained on in time, one after the other: no
    more than `max_age` versions after they were admitted. Groups of a version are admitted at a time, so that it is
    their counts that are looked at: O(versions) for a batch that is asked for.
    """

    def __init__(self, max_age: int) -> None:
        super().__init__()
        self._max_age = max_age
        self._versions: dict[int, int] = {}  # place -> newest one pulled when it was admitted
        self._waiting: Counter[int] = Counter()  # by version
        self._finished: Counter[int] = Counter()

    def add(self, place: int, index: int, version: int = 0) -> None:
        super().add(place, index, version)
        self._versions[place] = version
        self._waiting[version] += 1

    def finish(self, place: int) -> None:
        super().finish(place)
        self._finished[self._versions[place]] += 1

    def remove(self, place: int) -> None:
        version = self._versions.pop(place)
        if place not in self._open:
            self._finished[version] -= 1
        super().remove(place)
        self._waiting[version] -= 1
        if not self._waiting[version]:
            del self._waiting[version], self._finished[version]

    def can_give(self, count: int, version_of: Callable[[int], int]) -> bool:
        """Whether the first so many finished groups may go next.

        Args:
            version_of: that the step starts from on which, after that, the group is trained that has so many before it.
        """
        if self._finished.total() < count:
            return False
        left, behind, in_time = count, 0, True
        for version, waiting in sorted(self._waiting.items()):
            taken = min(left, self._finished[version])
            left -= taken
            behind += waiting - taken
            if waiting > taken and in_time:
                in_time = version_of(behind - 1) <= version + self._max_age
        return in_time or self.count(window=1) >= count

    def first(self, count: int) -> list[int]:
        """The indices of the first so many finished ones, in order."""
        finished = (place for place in self._indices if place not in self._open)
        return [self._indices[place] for place in heapq.nsmallest(count, finished)]

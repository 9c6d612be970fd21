"""The groups that have been admitted and are neither in a batch nor dropped."""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from functools import partial

from titan_rl.scheduling.batches.order import TrainingOrder
from titan_rl.scheduling.batches.ready_queue import AgedQueue, ReadyQueue
from titan_rl.scheduling.group_state import GroupState
from titan_rl.scheduling.lease import Lease


class WaitingGroups:
    """The leases of groups that wait for a batch, running or finished, by their position in the data.

    What happens to one group takes O(log groups), since there may be tens of thousands.

    Args:
        window: see `ReadyQueue`.
        max_age: in its place, see `AgedQueue`.
        batches_again: what the first batches consist of, whatever is ready before.
        order: by default that of the data.
    """

    def __init__(
        self,
        groups_per_step: int,
        window: int,
        max_age: int | None = None,
        batches_again: Sequence[Sequence[int]] = (),
        order: TrainingOrder | None = None,
    ) -> None:
        self._leases: dict[int, Lease] = {}  # in order of admission
        self._window = window
        self._groups_per_step = groups_per_step
        self._order = order
        self._batches_again = deque(batches_again)
        self._queues = defaultdict[str | None, ReadyQueue](
            ReadyQueue if max_age is None else partial(AgedQueue, max_age)
        )  # by task
        self._places: dict[int, tuple[str | None, int]] = {}  # index -> task, place
        self._turns: Counter[str | None] = Counter()  # of the next batch, by task; empty where that is not known
        self._num_finished = 0
        self.num_changes = 0  # of which groups wait
        self._by_age: list[tuple[int, int]] = []  # heap of newest version, index; of finished groups, and of some gone

    def __iter__(self) -> Iterator[Lease]:
        """In data order. They may be removed meanwhile."""
        return iter([self._leases[index] for index in sorted(self._leases)])

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def has_batches_again(self) -> bool:
        """What is in the next batch is settled."""
        return bool(self._batches_again)

    def add(self, lease: Lease, version: int) -> None:
        """A group is admitted, behind all before it.

        Args:
            version: the newest one pulled; -1 for a group whose first tokens may be older, which is not overtaken then.
        """
        index = lease.index
        self._leases[index] = lease
        task, place = None, index
        if self._order is not None:
            self._order.admitted(index)
            task, place = self._order.task_of(index), self._order.place_of(index)
        self._places[index] = task, place
        self._queues[task].add(place, index, version)
        self._turns.clear()
        self.num_changes += 1

    def finished(self, lease: Lease) -> None:
        """One of them has."""
        task, place = self._places[lease.index]
        self._queues[task].finish(place)
        self._num_finished += 1
        if lease.group is not None and (versions := lease.group.versions):
            heapq.heappush(self._by_age, (max(versions), lease.index))
        if len(self._by_age) > 2 * len(self._leases) + 16:
            self._by_age = [entry for entry in self._by_age if entry[1] in self._leases]
            heapq.heapify(self._by_age)

    def remove(self, lease: Lease) -> None:
        del self._leases[lease.index]
        task, place = self._places.pop(lease.index)
        self._queues[task].remove(place)
        self._num_finished -= lease.group is not None
        self.num_changes += 1

    def settle_all(self) -> None:
        for lease in list(self._leases.values()):
            self.remove(lease)
            lease.settle()

    def next_batch(self, size: int, version: int, *, are_all: bool) -> list[int]:
        """The groups of the next batch; none while one of them has not finished.

        Args:
            version: that the step on it starts from.
            are_all: no others will come before this batch is found. If then all have finished, and none is of a task
                whose turn it is, others go first; settings that were changed bring that about.
        """
        if self._batches_again:
            batch = list(self._batches_again[0])
            return batch if all(index in self._leases and _is_done(self._leases[index]) for index in batch) else []
        if self._num_finished < size:
            return []
        batch = self._first_finished(size, version)
        if not batch and are_all and self._num_finished == len(self._leases):
            batch = sorted(self._leases)[:size]
        return batch

    def leases(self, indices: Sequence[int]) -> list[Lease]:
        return [self._leases[index] for index in indices]

    def take_batch(self, indices: Sequence[int]) -> list[Lease]:
        """Remove what `next_batch` gave."""
        if self._batches_again:
            self._batches_again.popleft()
        leases = self.leases(indices)
        for lease in leases:
            self.remove(lease)
        if self._order is not None:
            self._order.batched(indices)
        self._turns.clear()
        return leases

    def overtaken_by(self, batch: Sequence[int]) -> list[Lease]:
        """Groups that still run, though later ones of their task are in the batch."""
        newest = {self._task_of(index): index for index in sorted(batch)}
        return [
            lease
            for lease in self
            if lease.state is GroupState.RUNNING and lease.index < newest.get(self._task_of(lease.index), -1)
        ]

    def take_stale(self, oldest_version: int) -> Iterator[Lease]:
        """Finished groups all of whose tokens are of versions before this one, each once."""
        while self._by_age and self._by_age[0][0] < oldest_version:
            lease = self._leases.get(heapq.heappop(self._by_age)[1])
            if lease is not None and lease.group is not None and max(lease.group.versions) < oldest_version:
                yield lease

    def could_give(self, size: int, version: int) -> bool:
        """Whether a batch can be had once all groups have finished but those that are suspended. O(groups).

        Args:
            version: that the step on it starts from.
        """
        suspended: defaultdict[str | None, set[int]] = defaultdict(set)  # their places, by task
        for index, lease in self._leases.items():
            if lease.state is GroupState.SUSPENDED:
                task, place = self._places[index]
                suspended[task].add(place)
                if self._batches_again and index in self._batches_again[0]:
                    return False
        turns = self._next_turns(size)
        return turns.total() >= size and all(
            self._can_give(self._queues[task].finished_but(suspended[task]), task, turns, version) for task in turns
        )

    def _first_finished(self, size: int, version: int) -> list[int]:
        """The next batch, if it can be had."""
        turns = self._next_turns(size)
        if turns.total() < size or not all(self._can_give(self._queues[task], task, turns, version) for task in turns):
            return []
        return sorted(index for task, count in turns.items() for index in self._queues[task].first(count))

    def _can_give(self, queue: ReadyQueue, task: str | None, turns: Counter[str | None], version: int) -> bool:
        """Whether so many of the task are finished as it has turns in the next batch, and may go next."""
        count, window = turns[task], self._window_of(task)
        if not isinstance(queue, AgedQueue):
            return queue.count(window) >= count
        if self._order is not None and task is not None and self._order.window(task, _WIDE) == 1:
            return queue.count(window=1) >= count  # its turns were dealt with other weights

        def version_of(num_before: int) -> int:
            if self._order is not None and task is not None:
                num_before = self._order.turns_before(task, count + num_before) - turns.total()
            return version + 1 + num_before // self._groups_per_step

        return queue.can_give(count, version_of)

    def _next_turns(self, size: int) -> Counter[str | None]:
        """Of the next batch, by task."""
        if self._order is None:
            return Counter({None: size})
        if self._turns.total() != size:
            self._turns = Counter(self._order.turns(size))
        return self._turns

    def _window_of(self, task: str | None) -> int:
        return self._window if self._order is None or task is None else self._order.window(task, self._window)

    def _task_of(self, index: int) -> str | None:
        return None if self._order is None else self._order.task_of(index)


_WIDE = 1 << 30


def _is_done(lease: Lease) -> bool:
    return lease.state is GroupState.DONE

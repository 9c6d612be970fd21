"""Batches: the groups of one optimizer step, and the queue of groups from which they are formed."""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Self

from titan_rl.core.errors import TrainingError
from titan_rl.rollout.types import RolloutGroup
from titan_rl.scheduling.lease import GroupState, Lease
from titan_rl.scheduling.settings import SchedulingConfig
from titan_rl.scheduling.task_mix import TaskMix


@dataclass(frozen=True, slots=True)
class GroupBatch:
    """Groups that hold their slots until `release`."""

    groups: list[RolloutGroup]  # [groups_per_step], the oldest first; the last batch may have fewer
    version: int  # version from which the step on them starts
    metrics: Mapping[str, float]  # see `Ledger.close_batch`
    on_release: Callable[[], None]

    @property
    def step(self) -> int:
        """Number of the step on this batch, which is also the version that the step makes."""
        return step_from(self.version)

    @property
    def num_tokens(self) -> int:
        """Number of completion tokens."""
        return sum(rollout.num_completion_tokens for group in self.groups for rollout in group.rollouts)

    def trained(self, version: int) -> None:
        """Check the version that the trainer reports for the step on this batch.

        Raises:
            TrainingError: `version` is not the version of this step.
        """
        if version != self.step:
            raise TrainingError(
                f"the step from version {self.version} gave version {version}: the versions of trainer and data differ"
            )

    def release(self) -> None:
        """Give the slots back. Call once, after the generators have pulled the version trained on these groups.

        Raises:
            RuntimeError: the batch of an earlier step has not been released.
        """
        self.on_release()


def step_from(version: int) -> int:
    """Number of the step that starts from a version. A step results in the version of the same number: the trainer
    assigns versions this way, and `GroupBatch.trained` checks it."""
    return version + 1


def check_age(groups: Sequence[RolloutGroup], version: int, bound: int, max_staleness: int) -> None:
    """Check that no token of a batch is more than `bound` versions old in the step from `version`.

    Args:
        groups: Groups of the batch.
        version: Version from which the step starts.
        bound: Largest age of a token in versions.
        max_staleness: Setting from which the bound follows, for the message.

    Raises:
        TrainingError: a token is older than the bound.
    """
    oldest = min((v for group in groups for v in group.versions), default=version)
    if version - oldest > bound:
        raise TrainingError(
            f"a token of version {oldest} reached the step from version {version}, but with "
            f"scheduling.max_staleness = {max_staleness} tokens are at most {bound} versions old"
        )


class ReadyQueue:
    """Groups of one task that wait for a batch, by their indices in the task's order.

    A finished group is eligible if it overtakes an unfinished one by fewer than `window` positions: over all batches
    together, a group is overtaken by at most `window - 1` others. Each operation on a group takes O(log groups).

    Example: the groups at 4 to 7 wait, and all but 4 are finished. With a window of 3 only 5 and 6 may overtake it:

        queue.count(window=3)   # 2
        queue.first(2)          # their indices
    """

    def __init__(self) -> None:
        self._indices: dict[int, int] = {}  # indices in the data of all waiting groups, by task index
        self._unfinished: list[int] = []  # heap of task indices; those not in `_open` are ignored
        self._open = set[int]()  # task indices of unfinished groups
        self._beyond: list[int] = []  # heap of finished task indices outside the window at the last `count`
        self._eligible = set[int]()  # finished task indices within the window
        self._newest = -1  # highest task index so far

    def add(self, task_index: int, index: int, version: int = 0) -> None:
        """Append an admitted group.

        Args:
            task_index: Index of the group in its task's order.
            index: Position of the group in the data.
            version: Newest version pulled; never less than that of the previous group.
        """
        if task_index < self._newest:  # it is generated again, so that later groups may be too far ahead of it
            for later in [each for each in self._eligible if each > task_index]:
                self._eligible.remove(later)
                heapq.heappush(self._beyond, later)
        self._newest = max(self._newest, task_index)
        self._indices[task_index] = index
        self._open.add(task_index)
        heapq.heappush(self._unfinished, task_index)

    def finish(self, task_index: int) -> None:
        self._open.discard(task_index)
        heapq.heappush(self._beyond, task_index)

    def remove(self, task_index: int) -> None:
        """Remove a group that is in a batch or was dropped."""
        del self._indices[task_index]
        self._open.discard(task_index)
        self._eligible.discard(task_index)

    def count(self, window: int) -> int:
        """Number of eligible groups. The window never shrinks."""
        while self._unfinished and self._unfinished[0] not in self._open:
            heapq.heappop(self._unfinished)
        limit = self._unfinished[0] + window if self._unfinished else math.inf
        while self._beyond and self._beyond[0] < limit:
            task_index = heapq.heappop(self._beyond)
            # A group that is generated again is open once more.
            if task_index in self._indices and task_index not in self._open:
                self._eligible.add(task_index)
        return len(self._eligible)

    def first(self, count: int) -> list[int]:
        """Indices of the first `count` eligible groups, in order. Call the method `count` first."""
        return [self._indices[task_index] for task_index in heapq.nsmallest(count, self._eligible)]

    def all_finished_except(self, task_indices: Set[int]) -> Self:
        """Copy of this queue in which all groups have finished except those at `task_indices`. O(groups)."""
        later = copy(self)
        vars(later).update({name: copy(value) for name, value in vars(self).items()})
        for task_index in self._open - task_indices:
            later.finish(task_index)
        return later


class AgedQueue(ReadyQueue):
    """Ready queue bounded by age: a finished group is eligible if the groups that it overtakes can still be trained on
    in order, at most `max_age` versions after their admission. Groups of one version are admitted together, so their
    counts suffice: a batch takes O(versions).
    """

    def __init__(self, max_age: int) -> None:
        super().__init__()
        self._max_age = max_age
        self._versions: dict[int, int] = {}  # newest version pulled at the admission of each group, by task index
        self._waiting: Counter[int] = Counter()  # number of waiting groups by version
        self._finished: Counter[int] = Counter()  # number of finished groups by version

    def add(self, task_index: int, index: int, version: int = 0) -> None:
        super().add(task_index, index, version)
        self._versions[task_index] = version
        self._waiting[version] += 1

    def finish(self, task_index: int) -> None:
        super().finish(task_index)
        self._finished[self._versions[task_index]] += 1

    def remove(self, task_index: int) -> None:
        version = self._versions.pop(task_index)
        if task_index not in self._open:
            self._finished[version] -= 1
        super().remove(task_index)
        self._waiting[version] -= 1
        if not self._waiting[version]:
            del self._waiting[version], self._finished[version]

    @property
    def num_finished(self) -> int:
        return self._finished.total()

    def deadlines(self, count: int) -> Iterator[tuple[int, int]]:
        """Deadlines of the groups that remain after the first `count` finished ones have left.

        Yields:
            For the last remaining group of each version: the number of groups before it, and the latest version from
            which its step may start.
        """
        left, behind = count, 0
        for version, waiting in sorted(self._waiting.items()):
            taken = min(left, self._finished[version])
            left -= taken
            behind += waiting - taken
            if waiting > taken:
                yield behind - 1, version + self._max_age

    def first(self, count: int) -> list[int]:
        """Indices of the first `count` finished groups, in order."""
        finished = (task_index for task_index in self._indices if task_index not in self._open)
        return [self._indices[task_index] for task_index in heapq.nsmallest(count, finished)]


class WaitingGroups:
    """Leases of the groups that wait for a batch, running or finished, by their position in the data.

    Each operation on a group takes O(log groups), since there may be tens of thousands.

    Args:
        settings: Settings of the scheduler.
        batches_again: Groups of the first batches, which are formed regardless of the groups that finish earlier.
        order: Tasks and turns of the groups; None for a single task in data order.
    """

    def __init__(
        self, settings: SchedulingConfig, batches_again: Sequence[Sequence[int]] = (), order: TaskMix | None = None
    ) -> None:
        self._leases: dict[int, Lease] = {}  # in order of admission
        self._window = settings.overtaking_window
        self._groups_per_step = settings.groups_per_step
        self._order = order
        self._batches_again = deque(batches_again)
        self._queues = defaultdict[str | None, ReadyQueue](
            ReadyQueue if settings.max_group_age is None else partial(AgedQueue, settings.max_group_age)
        )  # queues by task
        self._queue_keys: dict[int, tuple[str | None, int]] = {}  # task and task index of each group, by index
        self._turns: Counter[str | None] = Counter()  # turns of the next batch, by task; empty if not known
        self._num_finished = 0
        self.num_changes = 0  # additions and removals
        self._by_age: list[tuple[int, int]] = []  # heap of (newest version, index); has some removed groups too

    def __iter__(self) -> Iterator[Lease]:
        """Iterate over a snapshot in data order; groups may be removed during the iteration."""
        return iter([self._leases[index] for index in sorted(self._leases)])

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def has_batches_again(self) -> bool:
        """Whether the next batch is a batch of an earlier run that is handed out again."""
        return bool(self._batches_again)

    def add(self, lease: Lease, version: int) -> None:
        """Append an admitted group.

        Args:
            lease: Lease of the group.
            version: Newest version pulled. -1 for a group whose first tokens may be older, so that it is not overtaken.
        """
        index = lease.index
        self._leases[index] = lease
        task, task_index = None, index
        if self._order is not None:
            group = self._order.admitted(index)
            task, task_index = group.task, group.task_index
        self._queue_keys[index] = task, task_index
        self._queues[task].add(task_index, index, version)
        self._turns.clear()
        self.num_changes += 1

    def finished(self, lease: Lease) -> None:
        """Mark a group as finished."""
        task, task_index = self._queue_keys[lease.index]
        self._queues[task].finish(task_index)
        self._num_finished += 1
        if lease.group is not None and (versions := lease.group.versions):
            heapq.heappush(self._by_age, (max(versions), lease.index))
        if len(self._by_age) > 2 * len(self._leases) + 16:
            self._by_age = [entry for entry in self._by_age if entry[1] in self._leases]
            heapq.heapify(self._by_age)

    def remove(self, lease: Lease) -> None:
        del self._leases[lease.index]
        task, task_index = self._queue_keys.pop(lease.index)
        self._queues[task].remove(task_index)
        self._num_finished -= lease.group is not None
        self.num_changes += 1

    def settle_all(self) -> None:
        for lease in list(self._leases.values()):
            self.remove(lease)
            lease.settle()

    def next_batch(self, size: int, version: int, *, are_all: bool) -> list[int]:
        """Positions of the groups of the next batch; empty while one of them has not finished.

        Args:
            size: Number of groups.
            version: Version from which the step on the batch starts.
            are_all: Whether no other group will be admitted before this batch is formed. If all groups have finished,
                but none belongs to the task whose turn it is, groups of other tasks take the turn. This happens after
                settings were changed.
        """
        if self._batches_again:
            batch = list(self._batches_again[0])
            are_done = all(index in self._leases and self._leases[index].group is not None for index in batch)
            return batch if are_done else []
        if self._num_finished < size:
            return []
        turns, batch = self._next_turns(size), list[int]()
        if turns.total() >= size and all(self._can_give(self._queues[task], task, turns, version) for task in turns):
            batch = sorted(index for task, count in turns.items() for index in self._queues[task].first(count))
        if not batch and are_all and self._num_finished == len(self._leases):
            batch = sorted(self._leases)[:size]
        return batch

    def leases(self, indices: Sequence[int]) -> list[Lease]:
        return [self._leases[index] for index in indices]

    def take_batch(self, indices: Sequence[int]) -> list[Lease]:
        """Remove the groups that `next_batch` returned."""
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
        """Running groups with later groups of their task in the batch."""
        newest = {self._queue_keys[index][0]: index for index in sorted(batch)}
        return [
            lease
            for lease in self
            if lease.state is GroupState.RUNNING and lease.index < newest.get(self._queue_keys[lease.index][0], -1)
        ]

    def take_stale(self, oldest_version: int) -> Iterator[Lease]:
        """Yield, once each, the finished groups that have no token of this version or a later one."""
        while self._by_age and self._by_age[0][0] < oldest_version:
            lease = self._leases.get(heapq.heappop(self._by_age)[1])
            if lease is not None and lease.group is not None and max(lease.group.versions) < oldest_version:
                yield lease

    def could_give(self, size: int, version: int) -> bool:
        """Whether a batch is possible once all groups but the suspended ones have finished. O(groups).

        Args:
            size: Number of groups.
            version: Version from which the step on the batch starts.
        """
        suspended: defaultdict[str | None, set[int]] = defaultdict(set)  # task indices of the suspended groups, by task
        for index, lease in self._leases.items():
            if lease.state is GroupState.SUSPENDED:
                task, task_index = self._queue_keys[index]
                suspended[task].add(task_index)
                if self._batches_again and index in self._batches_again[0]:
                    return False
        turns = self._next_turns(size)
        return turns.total() >= size and all(
            self._can_give(self._queues[task].all_finished_except(suspended[task]), task, turns, version)
            for task in turns
        )

    def _can_give(self, queue: ReadyQueue, task: str | None, turns: Counter[str | None], version: int) -> bool:
        """Whether the task has an eligible group for each of its turns in the next batch."""
        count, window = turns[task], self._window
        if self._order is not None and task is not None:
            window = self._order.window(task, window)
        if not isinstance(queue, AgedQueue):
            return queue.count(window) >= count
        if self._order is not None and self._order.has_old_turns:
            return queue.count(window=1) >= count
        if queue.num_finished < count:
            return False
        for num_before, latest in queue.deadlines(count):
            if self._order is not None and task is not None:
                num_before = self._order.turns_before(task, count + num_before) - turns.total()
            if version + 1 + num_before // self._groups_per_step > latest:
                return queue.count(window=1) >= count
        return True

    def _next_turns(self, size: int) -> Counter[str | None]:
        """Number of turns of each task in the next batch."""
        if self._order is None:
            return Counter({None: size})
        if self._turns.total() != size:
            self._turns = Counter(self._order.turns(size))
        return self._turns

"""Which groups run now, in which batch they are trained, and what becomes of the long tail."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, count
from typing import Protocol

from titan_rl.config.sections import SchedulingConfig
from titan_rl.errors import TrainingError
from titan_rl.rollout.types import RolloutGroup
from titan_rl.scheduling.backlog import Backlog, SchedulerObserver
from titan_rl.scheduling.batch import GroupBatch
from titan_rl.scheduling.capacity import RolloutCapacity
from titan_rl.scheduling.filters import GroupFilter, first_error, first_reason, too_few_siblings
from titan_rl.scheduling.lease import Lease
from titan_rl.scheduling.ledger import GroupState, Ledger
from titan_rl.scheduling.slots import SlotPool
from titan_rl.scheduling.window import choose


class RunGroup(Protocol):
    async def __call__(self, lease: Lease) -> RolloutGroup:
        """Play the group of training sample number `lease.index` to its end."""
        ...


class GroupScheduler:
    """Admits groups in data order and hands out batches of those that finish. One mechanism with few knobs.

    With P groups a step and staleness S there are (S+1)P slots, and more for oversampling. A group holds one from its
    admission until the generators have pulled the version trained on it, or until it is dropped. So every token is
    trained on at most `settings.age_bound` versions after the one that sampled it: the bound is kept by admission, and
    nothing finished is thrown away for its age. In data order and without oversampling the bound is S, and S=0 is
    strictly on-policy.

    Example: P=2, S=1 gives four slots. Groups 0-3 start at version 0. The step on 0 and 1 makes version 1; once the
    generators have it, groups 4 and 5 start, while the trainer may already take 2 and 3.

    A group that a batch leaves unfinished goes on, later also under newer weights. By `settings.tail` it may wait for
    others like it, so that the slowest run together, or be dropped at an age.

    `run` admits groups until it is cancelled or the budget is spent. An exception of a group ends `run` with it.

    Args:
        group_size: rollouts of a group, for `settings.max_running_rollouts`.
        budget: groups to be trained on from now on; a dropped one is replaced.
        filters: say which finished groups cannot be trained on. Such a group returns its slot at once.
        version: newest version pulled.
        clock: seconds, for the metrics; by default the event loop's.
    """

    def __init__(
        self,
        run_group: RunGroup,
        settings: SchedulingConfig,
        *,
        group_size: int,
        budget: int,
        filters: Sequence[GroupFilter] = (too_few_siblings,),
        version: int = 0,
        backlog: Backlog | None = None,
        observer: SchedulerObserver | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._run_group = run_group
        self._settings = settings
        self._group_size = group_size
        self._filters = filters
        self._version = version
        self._next_version = version  # that the next batch is trained from
        self._backlog = backlog or Backlog()
        self._replay = deque(self._backlog.batches)
        self._next_index = self._backlog.next_index
        self._observer = observer
        self._ledger = Ledger(clock or asyncio.get_running_loop().time)
        self._slots = SlotPool(settings.num_slots)
        self._capacity = RolloutCapacity(settings.max_running_rollouts)
        self._budget = asyncio.Semaphore(budget)  # groups that may still be admitted
        self._waiting: dict[int, Lease] = {}  # neither in a batch nor dropped; ascending
        self._tasks = asyncio.TaskGroup()
        self._changed = asyncio.Event()
        self._drops: Counter[str] = Counter()  # since the last batch
        self._failures: list[str] = []  # of groups in a row

    @property
    def slots_held(self) -> int:
        return self._slots.held

    @property
    def rollouts_in_flight(self) -> int:
        return self._capacity.in_flight

    @property
    def next_index(self) -> int:
        """The data position: the sample number that is admitted next."""
        return self._next_index

    async def run(self) -> None:
        """Admit groups as slots come free. Cancelling it cancels every unfinished group. Awaited once."""
        async with self._tasks:
            for index in chain(self._backlog.unsettled, count(self._backlog.next_index)):
                await self._budget.acquire()
                lease = Lease(index, await self._slots.acquire(), self._ledger, self._capacity)
                self._waiting[index] = lease
                self._next_index = max(self._next_index, index + 1)
                if (group := self._backlog.finished.get(index)) is not None:
                    lease.finish(group)
                    self._changed.set()
                    continue
                await self._capacity.take(self._group_size)
                lease.start(self._group_size, self._version)
                lease.task = self._tasks.create_task(self._play(lease), name=f"group-{index}")

    async def next_batch(self) -> GroupBatch:
        """The next `groups_per_step` groups to train on, as soon as so many can be had.

        Raises:
            TrainingError: too many groups were dropped since the last batch, or lost to errors in a row; or a token
                is older than the bound, which only a generator that pulled other weights than it says can bring about.
        """
        self._drop_stale()
        while not (leases := self._choose()):
            self._give_up_if_hopeless()
            self._resume_tail_if_due()
            self._changed.clear()
            await self._changed.wait()
            self._drop_stale()
        version = self._next_version
        self._next_version += 1
        for lease in leases:
            del self._waiting[lease.index]
        groups = [lease.train() for lease in leases]
        self._check_age(groups, version)
        self._drops.clear()
        if self._observer is not None:
            self._observer.batch(version, [lease.index for lease in leases])
        if self._settings.tail == "tail_batch":
            self._suspend_overtaken(leases[-1].index)
        metrics = self._ledger.close_batch(groups, version)
        return GroupBatch(groups, version, metrics, partial(self._release, leases, version + 1))

    async def _play(self, lease: Lease) -> None:
        group = await self._run_group(lease)
        self._ledger.finished(group)
        reason = first_reason(self._filters, group)
        if reason == "failed":
            self._failures.append(first_error(group))
        else:
            self._failures.clear()
        if reason is None:
            lease.finish(group)
            if self._observer is not None:
                self._observer.finished(lease.index, group)
        else:
            self._drop(lease, reason, group)
        self._changed.set()

    def _drop(self, lease: Lease, reason: str, group: RolloutGroup | None = None) -> None:
        """Give up on a group; another one is admitted for it."""
        del self._waiting[lease.index]
        lease.end()
        self._budget.release()
        self._drops[reason] += 1
        self._ledger.dropped(reason, group)
        if self._observer is not None:
            self._observer.dropped(lease.index, reason, group)

    def _drop_stale(self) -> None:
        """Groups none of whose tokens is young enough for the next batch will not be for a later one."""
        max_age = self._settings.max_token_age
        if max_age is None or self._replay:
            return
        for lease in list(self._waiting.values()):
            versions = lease.group.versions if lease.group is not None else ()
            if versions and max(versions) < self._next_version - max_age:
                self._drop(lease, "too_stale", lease.group)

    def _choose(self) -> list[Lease]:
        """The groups of the next batch; none while there are too few."""
        if self._replay:
            indices = list(self._replay[0])
            if not all(self._is_done(index) for index in indices):
                return []
            self._replay.popleft()
        else:
            indices = self._choose_among(self._is_done)
        return [self._waiting[index] for index in indices] if len(indices) == self._settings.groups_per_step else []

    def _choose_among(self, is_ready: Callable[[int], bool]) -> list[int]:
        size, window = self._settings.groups_per_step, self._settings.overtaking_window
        return choose(self._waiting, is_ready, size=size, window=window)

    def _is_done(self, index: int) -> bool:
        return index in self._waiting and self._waiting[index].state is GroupState.DONE

    def _release(self, leases: Sequence[Lease], version: int) -> None:
        """The generators have pulled what was trained on these."""
        self._version = version
        for lease in leases:
            lease.end()
        if self._settings.tail == "drop":
            for lease in list(self._waiting.values()):
                if lease.state is GroupState.RUNNING and version - lease.version >= self._settings.tail_age:
                    assert lease.task is not None, "what runs has a task"
                    lease.task.cancel()
                    self._drop(lease, "too_old")
        self._changed.set()

    def _suspend_overtaken(self, newest: int) -> None:
        for lease in self._waiting.values():
            if lease.index < newest and lease.state is GroupState.RUNNING:
                lease.suspend()
                self._tasks.create_task(lease.gate.end_in_flight(), name=f"suspend-{lease.index}")

    def _resume_tail_if_due(self) -> None:
        """Suspended groups go on together: when they make a batch, or when none can be had without them."""
        suspended = [lease for lease in self._waiting.values() if lease.state is GroupState.SUSPENDED]
        others = self._choose_among(lambda index: self._waiting[index].state is not GroupState.SUSPENDED)
        more_can_come = self._slots.free and not self._budget.locked()
        size = self._settings.groups_per_step
        if len(suspended) >= size or (len(others) < size and not more_can_come):
            for lease in suspended:
                lease.resume()

    def _give_up_if_hopeless(self) -> None:
        settings = self._settings
        if self._drops.total() > settings.max_refills * settings.groups_per_step:
            reasons = ", ".join(f"{reason} ({count})" for reason, count in self._drops.most_common())
            raise TrainingError(
                f"{self._drops.total()} groups in a row could not be trained on: {reasons}; "
                f"raise scheduling.max_refills = {settings.max_refills} if this is expected"
            )
        if len(self._failures) >= settings.max_failed_groups:
            raise TrainingError(
                f"{len(self._failures)} groups in a row were lost to errors, the first to {self._failures[0]}; "
                f"rollouts.jsonl has them all; scheduling.max_failed_groups = {settings.max_failed_groups}"
            )

    def _check_age(self, groups: Sequence[RolloutGroup], version: int) -> None:
        oldest = min((v for group in groups for v in group.versions), default=version)
        if version - oldest > self._settings.age_bound:
            raise TrainingError(
                f"a token of version {oldest} reached the step from version {version}, but with "
                f"scheduling.max_staleness = {self._settings.max_staleness} tokens are at most "
                f"{self._settings.age_bound} versions old"
            )

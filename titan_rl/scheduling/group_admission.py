"""Groups from their slot to their end: admitted in data order, played, and kept or dropped."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Coroutine, Sequence
from functools import partial
from typing import Any

from titan_rl.rollout.types import RolloutGroup
from titan_rl.scheduling.admission.budget import Budget
from titan_rl.scheduling.admission.capacity import RolloutCapacity
from titan_rl.scheduling.admission.drop_limits import DropLimits
from titan_rl.scheduling.admission.slots import SlotPool
from titan_rl.scheduling.backlog import Backlog
from titan_rl.scheduling.batches.batch import step_from
from titan_rl.scheduling.batches.order import TrainingOrder
from titan_rl.scheduling.batches.waiting_groups import WaitingGroups
from titan_rl.scheduling.filters import GroupFilter, first_reason
from titan_rl.scheduling.group_state import GroupState
from titan_rl.scheduling.lease import Lease
from titan_rl.scheduling.ledger import Ledger
from titan_rl.scheduling.observer import SchedulerObserver
from titan_rl.scheduling.run_group import RunGroup
from titan_rl.scheduling.settings import SchedulingConfig
from titan_rl.scheduling.task_scope import TaskScope

logger = logging.getLogger(__name__)


class GroupAdmission:
    """Plays groups as slots come free. Those that finish wait in `waiting` for their batch.

    Groups of an earlier run come first: those of the batches that are handed out again, then in the order of their
    turns. Data order would not do where there are several tasks: a group that took the turn of a dropped one comes late
    in the data and early in the turns, and those between would hold slots for more steps than the age bound allows.

    Attributes:
        version: newest one pulled.
        next_version: that the next batch is trained from.
        next_index: the sample number that is admitted next.

    Args:
        waiting: where groups are from their admission until they are in a batch or dropped.
        tasks: in which they are played.
        changed: set when one has finished, or was dropped.
    """

    def __init__(
        self,
        run_group: RunGroup,
        settings: SchedulingConfig,
        *,
        group_size: int,
        filters: Sequence[GroupFilter],
        version: int,
        backlog: Backlog,
        observer: SchedulerObserver | None,
        order: TrainingOrder | None,
        ledger: Ledger,
        budget: Budget,
        waiting: WaitingGroups,
        tasks: TaskScope,
        changed: asyncio.Event,
    ) -> None:
        self.version = self.next_version = version
        self.next_index = backlog.next_index
        self.slots = SlotPool(settings.num_slots)
        self.capacity = RolloutCapacity(settings.max_running_rollouts)
        self.drop_limits = DropLimits(settings.groups_per_step, settings.max_refills, settings.max_failed_groups)
        self._run_group = run_group
        self._group_size = group_size
        self._filters = filters
        self._backlog = backlog
        self._observer = observer
        self._order = order
        self._ledger = ledger
        self._budget = budget
        self._waiting = waiting
        self._tasks = tasks
        self._changed = changed
        self._running: dict[int, asyncio.Task[None]] = {}
        self._to_restore = dict.fromkeys(backlog.unsettled)  # not admitted yet
        self._batched = deque(index for batch in backlog.batches for index in batch)  # of these, those that go first
        self._restored: dict[int, Lease] = {}  # admitted ones, until they are settled or played again

    async def run(self) -> None:
        """Admit groups until this is cancelled."""
        while True:
            await self.drop_limits.wait_within()
            await self._budget.admit()
            slot = await self.slots.acquire()
            await self.drop_limits.wait_within()  # what gave the slot back may have reached them
            index = self._take_index()
            lease = Lease(index, slot, self._ledger)
            if is_restored := index < self._backlog.next_index:
                self._restored[index] = lease
            self._waiting.add(lease, -1 if is_restored else self.version)
            self.next_index = max(self.next_index, index + 1)
            if (group := self._backlog.finished.get(index)) is not None:
                self._finish(lease, group)
                self._changed.set()
                continue
            lease.mark_running(await self.capacity.take(self._group_size), self.version)
            self._begin(lease, self._play(lease))

    def _take_index(self) -> int:
        """The group to admit into the slot that has just come free."""
        index = self._next_restored() if self._to_restore else None
        if index is None:
            return self.next_index
        del self._to_restore[index]
        return index

    def _next_restored(self) -> int | None:
        while self._batched:
            if (index := self._batched.popleft()) in self._to_restore:
                return index
        first = next(iter(self._to_restore))
        if self._order is None:
            return first
        if (index := self._order.next_restored()) is not None:
            return index if index in self._to_restore else first
        task_of = self._order.task_of
        return next((index for index in self._to_restore if task_of(index) is None), None)  # its records were lost

    def play_expired_again(self, oldest_version: int) -> None:
        """Generate those groups of an earlier run again that have finished with a token of a version before this one.

        In a run that was not killed, admission alone keeps the bound. What a journal has kept of a group may be older,
        where part of it was lost or the settings are others. So may what is generated now for a group whose turn was
        lost with it. That happens to a group once: what is too old the second time a generator has stamped wrongly.
        """
        for index, lease in list(self._restored.items()):
            if lease.state in (None, GroupState.TRAINING):
                del self._restored[index]
            elif lease.group is not None and min(lease.group.versions, default=oldest_version) < oldest_version:
                del self._restored[index]
                self._play_again(lease, lease.group)

    def _play_again(self, lease: Lease, group: RolloutGroup) -> None:
        self._ledger.wasted(group)
        self._waiting.remove(lease)
        lease.begin_again()
        self._waiting.add(lease, -1)
        if self._observer is not None:
            self._observer.discarded(lease.index, group)
        self._begin(lease, self._play_restored(lease))

    async def _play_restored(self, lease: Lease) -> None:
        lease.mark_running(await self.capacity.take(self._group_size), self.version)
        await self._play(lease)

    def _begin(self, lease: Lease, work: Coroutine[Any, Any, None]) -> None:
        self._running[lease.index] = task = self._tasks.begin(lambda: work, f"group-{lease.index}")
        task.add_done_callback(partial(self._note_end, lease))

    def cancel(self, lease: Lease, reason: str) -> None:
        """Give up on a group that still runs."""
        self._tasks.cancel(self._running[lease.index])
        self.drop(lease, reason)

    def drop(self, lease: Lease, reason: str, group: RolloutGroup | None = None) -> None:
        """Give up on a group; another one is admitted for it."""
        self._waiting.remove(lease)
        lease.settle()
        self._budget.replace()
        task = None if self._order is None else self._order.task_of(lease.index)
        self.drop_limits.dropped(reason, group, task)
        self._ledger.dropped(reason, group)
        if self._observer is not None:
            self._observer.dropped(step_from(self.next_version), lease.index, reason, group)

    async def _play(self, lease: Lease) -> None:
        try:
            group = await self._run_group(lease)
        except Exception as error:
            if lease.state is not None:
                raise
            logger.warning("group %d failed after it was dropped: %r", lease.index, error)
            return
        self._ledger.finished(group)
        if lease.state is None:  # it was dropped, and returned all the same
            self._ledger.wasted(group)
            return
        reason = first_reason(self._filters, group)
        self.drop_limits.finished(group, reason)
        if reason is None:
            self._finish(lease, group)
            if self._observer is not None:
                self._observer.finished(lease.index, group)
        else:
            self.drop(lease, reason, group)
        self._changed.set()

    def _finish(self, lease: Lease, group: RolloutGroup) -> None:
        lease.mark_done(group)
        self._waiting.finished(lease)

    def _note_end(self, lease: Lease, task: asyncio.Task[None]) -> None:
        """Called with a group's task when it is done, also if it was cancelled before its first turn."""
        if self._running[lease.index] is task:  # else the group is being played again
            del self._running[lease.index]
        lease.has_ended()

"""Groups from their slot to their end: admitted in data order, played, and kept or dropped."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import partial
from itertools import chain, count

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
from titan_rl.scheduling.lease import Lease
from titan_rl.scheduling.ledger import Ledger
from titan_rl.scheduling.observer import SchedulerObserver
from titan_rl.scheduling.run_group import RunGroup
from titan_rl.scheduling.settings import SchedulingConfig
from titan_rl.scheduling.task_scope import TaskScope

logger = logging.getLogger(__name__)


class GroupAdmission:
    """Plays groups as slots come free. Those that finish wait in `waiting` for their batch.

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

    async def run(self) -> None:
        """Admit groups until this is cancelled."""
        for index in chain(self._backlog.unsettled, count(self._backlog.next_index)):
            await self.drop_limits.wait_within()
            await self._budget.admit()
            slot = await self.slots.acquire()
            await self.drop_limits.wait_within()  # what gave the slot back may have reached them
            lease = Lease(index, slot, self._ledger)
            self._waiting.add(lease, -1 if index < self._backlog.next_index else self.version)
            self.next_index = max(self.next_index, index + 1)
            if (group := self._backlog.finished.get(index)) is not None:
                self._finish(lease, group)
                self._changed.set()
                continue
            lease.mark_running(await self.capacity.take(self._group_size), self.version)
            self._running[index] = task = self._tasks.begin(partial(self._play, lease), f"group-{index}")
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
        """Of a group's task, also of one that was cancelled before its first turn."""
        del self._running[lease.index]
        lease.has_ended()

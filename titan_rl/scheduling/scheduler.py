"""Which groups run now, in which batch they are trained, and what becomes of the long tail."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from functools import partial
from itertools import chain, count
from types import TracebackType
from typing import Any, Self

from titan_rl.errors import TrainingError
from titan_rl.rollout.types import RolloutGroup
from titan_rl.scheduling.admission.budget import Budget
from titan_rl.scheduling.admission.capacity import RolloutCapacity
from titan_rl.scheduling.admission.drop_limits import DropLimits
from titan_rl.scheduling.admission.slots import SlotPool
from titan_rl.scheduling.backlog import Backlog
from titan_rl.scheduling.batch import GroupBatch, check_age, step_from
from titan_rl.scheduling.filters import GroupFilter, first_reason, too_few_siblings
from titan_rl.scheduling.lease import Lease
from titan_rl.scheduling.ledger import Ledger
from titan_rl.scheduling.observer import SchedulerObserver
from titan_rl.scheduling.run_group import RunGroup
from titan_rl.scheduling.settings import SchedulingConfig
from titan_rl.scheduling.tail import LongTail
from titan_rl.scheduling.task_scope import TaskScope, WithEndCallback
from titan_rl.scheduling.waiting_groups import WaitingGroups

logger = logging.getLogger(__name__)


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

    An exception of a group ends everything: the block is left with it. So does a cancellation of its task that is none
    of the scheduler's own.

    Example, a loop that has the weights pulled before it goes on:

        async with GroupScheduler(run_group, SchedulingConfig(), group_size=8, budget=steps * 16) as scheduler:
            async for batch in scheduler.batches():
                result = await asyncio.to_thread(trainer.step, samples_of(batch.groups))
                await router.pull_state_dict(result.version)

    One that trains while the generators pull takes `next_batch` and calls the batch's `release` itself, and one that
    has a task group of its own may have it carry `run`, in place of the block.

    Args:
        group_size: rollouts of a group, for `settings.max_running_rollouts`.
        budget: groups to be trained on from now on; a dropped one is replaced. Where it is no multiple of
            `settings.groups_per_step`, the last batch has fewer.
        filters: say which finished groups cannot be trained on. Such a group returns its slot at once.
        version: newest version pulled.
        clock: seconds, for the metrics; by default the event loop's.

    Raises:
        ConfigError: the settings would never admit what `backlog` has to hand out again.
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
        self._backlog.check_admission(settings.num_slots, budget)
        self._next_index = self._backlog.next_index
        self._observer = observer
        self._ledger = Ledger(clock or asyncio.get_running_loop().time)
        self._slots = SlotPool(settings.num_slots)
        self._capacity = RolloutCapacity(settings.max_running_rollouts)
        self._budget = Budget(budget)
        self._waiting = WaitingGroups(settings.overtaking_window, self._backlog.batches)
        self._changed = asyncio.Event()
        self._tasks = TaskScope(on_error=self._changed.set)
        self._tail = LongTail(settings.tail, settings.tail_age, self._waiting, self._capacity, self._tasks)
        self._running_groups: dict[int, asyncio.Task[None]] = {}
        self._drop_limits = DropLimits(settings.groups_per_step, settings.max_refills, settings.max_failed_groups)
        self._is_running = self._is_over = False  # `run` was called; it ends

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

    async def __aenter__(self) -> Self:
        """`run` begins, and ends with the block."""
        self._block = asyncio.TaskGroup()
        await self._block.__aenter__()
        self._running = self._block.create_task(self.run(), name="scheduler")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._running.cancel()
        failed = False
        try:
            await self._block.__aexit__(kind, error, traceback)
        except BaseExceptionGroup:
            failed = True
        if failed and (error is None or isinstance(error, asyncio.CancelledError)):
            assert self._tasks.error is not None, "a task that fails says so"
            raise self._tasks.error  # itself, and not a group that holds it

    def run(self) -> Coroutine[Any, Any, None]:
        """Admit groups as slots come free, until all of the budget are handed out.

        Called once. Cancelling it cancels every unfinished group, and `next_batch` raises from then on, also where it
        was cancelled before its first turn.
        """
        if self._is_running:
            raise RuntimeError("GroupScheduler.run is called once")
        self._is_running = True
        return WithEndCallback(self._run(), on_end=self._note_end_of_run)

    async def _run(self) -> None:
        async with self._tasks:
            admission = self._tasks.begin(self._admit, "admission")
            try:
                await self._budget.wait_used_up()
            finally:  # told at once, though groups may take a while to be cancelled
                self._note_over()
            self._tasks.cancel(admission)

    def _note_over(self) -> None:
        self._is_over = True
        self._changed.set()

    def _note_end_of_run(self) -> None:
        self._note_over()
        self._waiting.settle_all()

    async def batches(self) -> AsyncGenerator[GroupBatch]:
        """Every batch of the budget. One is released when the next is asked for: until then its version is pulled.

        Raises:
            As `next_batch`.
        """
        while self._budget.left:
            batch = await self.next_batch()
            yield batch
            batch.release()

    async def next_batch(self) -> GroupBatch:
        """The next `groups_per_step` groups to train on, as soon as so many can be had.

        Raises:
            TrainingError: too many groups were dropped since the last batch, or lost to errors in a row; or a token
                is older than the bound, which only a generator that pulled other weights than it says can bring about;
                or there are no further batches, because the budget is handed out or `run` was cancelled.
            RuntimeError: nothing runs yet that a batch could come from.
            Exception: what a group raised.
        """
        self._check_going()
        self._drop_stale()
        while not (indices := self._waiting.next_batch(self._batch_size)):
            self._drop_limits.check()
            self._tail.resume_if_due(self._batch_size, more_can_come=self._slots.free > 0 and self._budget.may_admit)
            self._changed.clear()
            await self._changed.wait()
            self._check_going()
            self._drop_stale()
        leases = self._waiting.take_batch(indices)
        self._budget.hand_out(len(leases))
        groups = [lease.mark_training() for lease in leases]
        check_age(groups, self._next_version, self._settings.age_bound, self._settings.max_staleness)
        self._drop_limits.batch_found()
        if self._observer is not None:
            self._observer.batch(self._next_version, indices)
        self._tail.batch_formed(newest=indices[-1])
        metrics = self._ledger.close_batch(groups, self._next_version)
        batch = GroupBatch(groups, self._next_version, metrics, lambda: self._settle(leases, batch.step))
        self._next_version = batch.step
        return batch

    async def _admit(self) -> None:
        for index in chain(self._backlog.unsettled, count(self._backlog.next_index)):
            await self._drop_limits.wait_within()
            await self._budget.admit()
            slot = await self._slots.acquire()
            await self._drop_limits.wait_within()  # what gave the slot back may have reached them
            lease = Lease(index, slot, self._ledger)
            self._waiting.add(lease)
            self._next_index = max(self._next_index, index + 1)
            if (group := self._backlog.finished.get(index)) is not None:
                lease.mark_done(group)
                self._changed.set()
                continue
            lease.mark_running(await self._capacity.take(self._group_size), self._version)
            self._running_groups[index] = task = self._tasks.begin(partial(self._run_one, lease), f"group-{index}")
            task.add_done_callback(partial(self._note_end, lease))

    async def _run_one(self, lease: Lease) -> None:
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
        self._drop_limits.finished(group, reason)
        if reason is None:
            lease.mark_done(group)
            if self._observer is not None:
                self._observer.finished(lease.index, group)
        else:
            self._drop(lease, reason, group)
        self._changed.set()

    def _note_end(self, lease: Lease, task: asyncio.Task[None]) -> None:
        """Of a group's task, also of one that was cancelled before its first turn."""
        del self._running_groups[lease.index]
        lease.has_ended()

    def _drop(self, lease: Lease, reason: str, group: RolloutGroup | None = None) -> None:
        """Give up on a group; another one is admitted for it."""
        self._waiting.remove(lease)
        lease.settle()
        self._budget.replace()
        self._drop_limits.dropped(reason, group)
        self._ledger.dropped(reason, group)
        if self._observer is not None:
            self._observer.dropped(step_from(self._next_version), lease.index, reason, group)

    def _drop_stale(self) -> None:
        """Groups none of whose tokens is young enough for the next batch will not be for a later one."""
        max_age = self._settings.max_token_age
        if max_age is None or self._waiting.has_batches_again:
            return
        for lease in self._waiting.stale(self._next_version - max_age):
            self._drop(lease, "too_stale", lease.group)

    @property
    def _batch_size(self) -> int:
        return min(self._settings.groups_per_step, self._budget.left)

    def _settle(self, leases: Sequence[Lease], version: int) -> None:
        """The generators have pulled what was trained on these."""
        self._version = version
        for lease in leases:
            lease.settle()
        for lease in self._tail.too_old(version):
            self._tasks.cancel(self._running_groups[lease.index])
            self._drop(lease, "too_old")
        self._changed.set()

    def _check_going(self) -> None:
        if not self._is_running:
            raise RuntimeError("GroupScheduler is not running; enter its block, or call run, before next_batch")
        if self._tasks.error is not None:
            raise self._tasks.error
        if not self._budget.left:
            raise TrainingError("there is no further batch: all groups of the budget have been handed out")
        if self._is_over:
            raise TrainingError("there is no further batch: GroupScheduler.run was cancelled")

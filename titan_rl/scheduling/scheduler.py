"""Group scheduler: admits groups as slots become free, runs them, and hands out batches of finished ones."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from titan_rl.core.clock import LoopClock
from titan_rl.core.errors import TrainingError
from titan_rl.rollout.types import RolloutGroup
from titan_rl.scheduling.asyncio_tasks import FirstFailureTaskGroup, WithEndCallback
from titan_rl.scheduling.backlog import Backlog, RestoreQueue, SchedulerObserver
from titan_rl.scheduling.batches import GroupBatch, WaitingGroups, check_age, step_from
from titan_rl.scheduling.filters import GroupFilter, first_reason, too_few_siblings
from titan_rl.scheduling.lease import GroupState, Lease, Ledger, RunGroup
from titan_rl.scheduling.limits import Budget, DropLimits, RolloutCapacity, SlotPool
from titan_rl.scheduling.settings import SchedulingConfig
from titan_rl.scheduling.task_mix import TaskMix

logger = logging.getLogger(__name__)


class GroupScheduler:
    """Admits groups in data order and hands out batches of finished groups.

    With P groups per step and staleness S there are (S+1)P slots, and more for oversampling. A group holds a slot from
    its admission until the generators have pulled the version trained on it, or until it is dropped. Every token is
    therefore trained on at most `settings.age_bound` versions after the version that sampled it: admission ensures the
    bound, and no finished group is discarded for its age. In data order and without oversampling the bound is S, and
    S=0 is strictly on-policy.

    Example: P=2, S=1 gives four slots. Groups 0-3 start at version 0. The step on 0 and 1 makes version 1; once the
    generators have it, groups 4 and 5 start, while the trainer may already take 2 and 3.

    An unfinished group that a batch overtakes continues, later with newer weights. With `settings.tail` it may instead
    wait for other slow groups and run together with them, or be dropped at an age.

    An exception in a group ends the scheduler, and the block raises the exception. A cancellation of the group's task
    that the scheduler did not request has the same effect.

    Example: a loop that waits for each pull:

        async with GroupScheduler(run_group, SchedulingConfig(), group_size=8, budget=steps * 16) as scheduler:
            async for batch in scheduler.batches():
                result = await asyncio.to_thread(trainer.step, samples_of(batch.groups))
                await router.pull_state_dict(result.version)

    A loop that trains while the generators pull calls `next_batch` and the batch's `release` itself. A loop with its
    own task group may run `run` there instead of entering the block.

    Args:
        run_group: Runs one group.
        settings: Settings of the scheduler.
        group_size: Number of rollouts of a group, for `settings.max_running_rollouts`.
        budget: Number of groups to train on from now on; dropped groups are replaced. If it is not a multiple of
            `settings.groups_per_step`, the last batch is smaller.
        filters: Decide which finished groups are not trained on. Such a group returns its slot at once.
        version: Newest version pulled.
        backlog: Groups of an earlier run, which are admitted first.
        observer: Records the events that a later run needs.
        order: Assigns groups to tasks and batches; by default there is one task, in data order. The caller must report
            finished, dropped and trained groups to it.

    Raises:
        ConfigError: the settings would never admit a batch that `backlog` has to hand out again.
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
        order: TaskMix | None = None,
    ) -> None:
        backlog = backlog or Backlog()
        backlog.check_admission(settings.num_slots, budget)
        self._run_group = run_group
        self._settings = settings
        self._group_size = group_size
        self._filters = filters
        self._observer = observer
        self._order = order
        self._pulled_version = self._next_version = version  # the step on the next batch starts from `_next_version`
        self._next_index = backlog.next_index
        self._backlog = backlog
        self._to_restore = RestoreQueue(backlog, order)
        self._restored: dict[int, Lease] = {}  # admitted groups of the backlog, until settled or generated again
        self._ledger = Ledger(LoopClock())
        self._slots = SlotPool(settings.num_slots)
        self._capacity = RolloutCapacity(settings.max_running_rollouts)
        self._budget = Budget(budget)
        self._drop_limits = DropLimits(settings)
        self._waiting = WaitingGroups(settings, backlog.batches, order)
        self._changed = asyncio.Event()  # a batch may have become available, or the scheduler has ended
        self._tasks = FirstFailureTaskGroup(failed=self._changed)
        self._group_tasks: dict[int, asyncio.Task[None]] = {}
        self._is_running = self._is_over = False  # whether `run` was called, and whether it is ending
        self._resume_checked_at: tuple[int, int, int, bool] | None = None  # inputs of the last `_resume_suspended`

    @property
    def slots_held(self) -> int:
        return self._slots.size - self._slots.free

    @property
    def states(self) -> Mapping[GroupState, int]:
        """Number of groups in each state that holds a slot."""
        return self._ledger.states

    @property
    def rollouts_in_flight(self) -> int:
        return self._capacity.in_flight

    @property
    def next_index(self) -> int:
        """Position in the data that is admitted next."""
        return self._next_index

    async def __aenter__(self) -> Self:
        """Start `run`, which ends with the block."""
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
            assert self._tasks.error is not None, "a task that fails records its error"
            raise self._tasks.error  # without the exception group

    def run(self) -> Coroutine[Any, Any, None]:
        """Admit groups as slots become free, until the budget has been handed out.

        Called once. Cancelling it cancels every unfinished group, and `next_batch` raises from then on, even if the
        coroutine was cancelled before its first turn.
        """
        if self._is_running:
            raise RuntimeError("GroupScheduler.run is called once")
        self._is_running = True
        return WithEndCallback(self._run(), on_end=self._note_end_of_run)

    async def _run(self) -> None:
        async with self._tasks:
            admission = self._tasks.begin(self._admit_groups(), "admission")
            try:
                await self._budget.wait_used_up()
            finally:  # reported at once, because cancelling the groups may take a while
                self._note_over()
            self._tasks.cancel(admission)

    def _note_over(self) -> None:
        self._is_over = True
        self._changed.set()

    def _note_end_of_run(self) -> None:
        self._note_over()
        self._waiting.settle_all()

    # Admission: from a free slot to a finished group

    async def _admit_groups(self) -> None:
        """Admit groups until cancelled: first the groups of the backlog, then new ones in data order."""
        while True:
            await self._drop_limits.wait_within()
            await self._budget.admit()
            await self._slots.acquire()
            await self._drop_limits.wait_within()  # the drop that freed the slot may have reached a limit
            index = self._to_restore.take()
            is_restored = index is not None
            if index is None:
                index = self._next_index
            lease = Lease(index, self._slots, self._ledger)
            if is_restored:
                self._restored[index] = lease
            self._waiting.add(lease, -1 if is_restored else self._pulled_version)
            self._next_index = max(self._next_index, index + 1)
            if (group := self._backlog.finished.get(index)) is not None:
                self._mark_done(lease, group)
                self._changed.set()
                continue
            lease.mark_running(await self._capacity.take(self._group_size), self._pulled_version)
            self._begin(lease, self._play(lease))

    def _begin(self, lease: Lease, work: Coroutine[Any, Any, None]) -> None:
        self._group_tasks[lease.index] = task = self._tasks.begin(work, f"group-{lease.index}")

        def note_end(task: asyncio.Task[None]) -> None:  # called even if the task was cancelled before its first turn
            if self._group_tasks[lease.index] is task:  # otherwise the group is being generated again
                del self._group_tasks[lease.index]
            lease.has_ended()

        task.add_done_callback(note_end)

    async def _play(self, lease: Lease) -> None:
        try:
            group = await self._run_group(lease)
        except Exception as error:
            if lease.state is not None:
                raise
            logger.warning("group %d failed after it was dropped: %r", lease.index, error)
            return
        self._ledger.finished(group)
        if lease.state is None:  # dropped in the meantime
            self._ledger.wasted(group)
            return
        reason = first_reason(self._filters, group)
        self._drop_limits.finished(group, reason)
        if reason is None:
            self._mark_done(lease, group)
            if self._observer is not None:
                self._observer.finished(lease.index, group)
        else:
            self._drop(lease, reason, group)
        self._changed.set()

    def _mark_done(self, lease: Lease, group: RolloutGroup) -> None:
        lease.mark_done(group)
        self._waiting.finished(lease)

    def _drop(self, lease: Lease, reason: str, group: RolloutGroup | None = None) -> None:
        """Drop a group; another one is admitted in its place."""
        self._waiting.remove(lease)
        lease.settle()
        self._budget.replace()
        task = None if self._order is None else self._order.task_of(lease.index)
        self._drop_limits.dropped(reason, group, task)
        self._ledger.dropped(reason, group)
        if self._observer is not None:
            self._observer.dropped(step_from(self._next_version), lease.index, reason, group)

    # Batches

    async def batches(self) -> AsyncGenerator[GroupBatch]:
        """Every batch of the budget. A batch is released when the next one is requested; by then the generators must
        have pulled its version.

        Raises:
            Exception: see `next_batch`.
        """
        while self._budget.left:
            batch = await self.next_batch()
            yield batch
            batch.release()

    async def next_batch(self) -> GroupBatch:
        """Wait for the next `groups_per_step` groups to train on.

        Raises:
            TrainingError: too many groups were dropped since the last batch, or lost to errors in a row; or a token
                is older than the bound, which happens only if a generator pulled other weights than it reports;
                or there are no further batches, because the budget is handed out or `run` was cancelled.
            RuntimeError: the scheduler is not running.
            Exception: raised by a group.
        """
        while True:
            self._check_running()
            self._remove_stale()
            if indices := self._next_indices():
                break
            self._drop_limits.check()
            self._resume_suspended()
            self._changed.clear()
            await self._changed.wait()
        self._suspend_overtaken(indices)
        version, step = self._next_version, step_from(self._next_version)
        leases = self._waiting.take_batch(indices)
        self._budget.hand_out(len(leases))
        groups = [lease.mark_training() for lease in leases]
        check_age(groups, version, self._settings.age_bound, self._settings.max_staleness)
        self._drop_limits.batch_found()
        if self._observer is not None:
            self._observer.batch(version, indices)
        metrics = self._ledger.close_batch(groups, version)
        self._next_version = step
        return GroupBatch(groups, version, metrics, lambda: self._release(leases, step))

    def _next_indices(self) -> list[int]:
        """Positions of the groups of the next batch; empty if it is not available. Batches without any token to train
        are dropped."""
        while indices := self._waiting.next_batch(self._batch_size, self._next_version, are_all=self._are_all):
            leases = self._waiting.leases(indices)
            if not self._is_masked(leases):
                return indices
            for lease in leases:
                self._drop(lease, "too_stale", lease.group)
        return []

    @property
    def _batch_size(self) -> int:
        return min(self._settings.groups_per_step, self._budget.left)

    @property
    def _are_all(self) -> bool:
        """Whether no group can be admitted before the next batch is formed."""
        return len(self._waiting) in (self._slots.size, self._budget.left)

    def _release(self, leases: Sequence[Lease], version: int) -> None:
        """Give the slots of a batch back, once the generators have pulled the version trained on it.

        Raises:
            RuntimeError: an earlier batch has not been released.
        """
        if version > self._pulled_version + 1:
            raise RuntimeError(
                f"the batch of step {version} is released before that of step {self._pulled_version + 1}; release "
                "batches in the order of their steps"
            )
        for lease in leases:
            lease.settle()
        self._pulled_version = version
        self._drop_old_tail()
        self._changed.set()

    def _check_running(self) -> None:
        if not self._is_running:
            raise RuntimeError("GroupScheduler is not running; enter its block, or call run, before next_batch")
        if self._tasks.error is not None:
            raise self._tasks.error
        if not self._budget.left:
            raise TrainingError("there is no further batch: all groups of the budget have been handed out")
        if self._is_over:
            raise TrainingError("there is no further batch: GroupScheduler.run was cancelled")

    # Age: finished groups that are too old for the next batch, and therefore for any later one

    def _remove_stale(self) -> None:
        """Drop finished groups that have no token young enough to train, and generate expired restored groups again."""
        max_age = self._settings.max_token_age
        if max_age is not None and self._settings.stale_groups == "drop" and not self._waiting.has_batches_again:
            for lease in self._waiting.take_stale(self._next_version - max_age):
                self._drop(lease, "too_stale", lease.group)
        self._regenerate_expired(self._next_version - self._settings.age_bound)

    def _is_masked(self, leases: Sequence[Lease]) -> bool:
        """Whether all tokens of these groups are too old to be trained."""
        max_age = self._settings.max_token_age
        if max_age is None or self._waiting.has_batches_again:
            return False
        versions = [version for lease in leases if lease.group is not None for version in lease.group.versions]
        return bool(versions) and max(versions) < self._next_version - max_age

    def _regenerate_expired(self, oldest_version: int) -> None:
        """Generate those restored groups again that have finished with a token of a version before `oldest_version`.

        In a run that was not killed, admission alone ensures the bound. A group from the journal may be older, if part
        of the journal was lost or the settings changed. A group that is generated now may also be older, if its turn
        was lost with the journal. This happens to a group at most once: if it is too old a second time, a generator has
        reported a wrong version.
        """
        for index, lease in list(self._restored.items()):
            if lease.state in (None, GroupState.TRAINING):
                del self._restored[index]
            elif lease.group is not None and min(lease.group.versions, default=oldest_version) < oldest_version:
                del self._restored[index]
                self._generate_again(lease, lease.group)

    def _generate_again(self, lease: Lease, group: RolloutGroup) -> None:
        self._ledger.wasted(group)
        self._waiting.remove(lease)
        lease.begin_again()
        self._waiting.add(lease, -1)
        if self._observer is not None:
            self._observer.discarded(lease.index, group)

        async def play_when_permitted() -> None:
            lease.mark_running(await self._capacity.take(self._group_size), self._pulled_version)
            await self._play(lease)

        self._begin(lease, play_when_permitted())

    # The long tail: groups that still run when later ones are trained on (`scheduling.tail`)

    def _suspend_overtaken(self, indices: Sequence[int]) -> None:
        """If `tail` is "tail_batch", suspend the running groups that the batch of the groups at `indices` overtook."""
        if self._settings.tail == "tail_batch":
            for lease in self._waiting.overtaken_by(indices):
                lease.suspend()
                self._tasks.begin(lease.wait_suspended(self._capacity), f"suspend-{lease.index}")

    def _resume_suspended(self) -> None:
        """Resume all suspended groups together: when they fill a batch, or when no batch is possible without them."""
        num_suspended = self._ledger.states[GroupState.SUSPENDED]
        if self._settings.tail != "tail_batch" or not num_suspended:
            return
        size, more_can_come = self._batch_size, self._slots.free > 0 and self._budget.may_admit
        checked_at = self._waiting.num_changes, num_suspended, size, more_can_come
        if checked_at == self._resume_checked_at:  # another group has finished, which changes nothing
            return
        self._resume_checked_at = checked_at
        if num_suspended >= size or (not more_can_come and not self._waiting.could_give(size, self._next_version)):
            for lease in self._waiting:
                if lease.state is GroupState.SUSPENDED:
                    lease.let_resume()

    def _drop_old_tail(self) -> None:
        """Drop running groups that were admitted `drop_age` versions ago or earlier."""
        age = self._settings.drop_age
        if age is None:
            return
        for lease in self._waiting:
            if lease.state is GroupState.RUNNING and self._pulled_version - lease.version >= age:
                self._tasks.cancel(self._group_tasks[lease.index])
                self._drop(lease, "too_old")

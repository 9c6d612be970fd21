"""Which groups run now, in which batch they are trained, and what becomes of the long tail."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from titan_rl.core.errors import TrainingError
from titan_rl.scheduling.admission.budget import Budget
from titan_rl.scheduling.backlog import Backlog
from titan_rl.scheduling.batches.batch import GroupBatch, check_age, step_from
from titan_rl.scheduling.batches.order import TrainingOrder
from titan_rl.scheduling.batches.waiting_groups import WaitingGroups
from titan_rl.scheduling.filters import GroupFilter, too_few_siblings
from titan_rl.scheduling.group_admission import GroupAdmission
from titan_rl.scheduling.group_state import GroupState
from titan_rl.scheduling.lease import Lease
from titan_rl.scheduling.ledger import Ledger
from titan_rl.scheduling.observer import SchedulerObserver
from titan_rl.scheduling.run_group import RunGroup
from titan_rl.scheduling.settings import SchedulingConfig
from titan_rl.scheduling.tail import LongTail
from titan_rl.scheduling.task_scope import TaskScope, WithEndCallback


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
        order: which groups a batch is of; by default that of the data. It is to be told of drops by who gave it.
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
        order: TrainingOrder | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        backlog = backlog or Backlog()
        backlog.check_admission(settings.num_slots, budget)
        self._settings = settings
        self._observer = observer
        self._ledger = Ledger(clock or asyncio.get_running_loop().time)
        self._budget = Budget(budget)
        self._waiting = WaitingGroups(
            settings.groups_per_step, settings.overtaking_window, settings.max_group_age, backlog.batches, order
        )
        self._changed = asyncio.Event()
        self._tasks = TaskScope(on_error=self._changed.set)
        self._admission = GroupAdmission(
            run_group,
            settings,
            group_size=group_size,
            filters=filters,
            version=version,
            backlog=backlog,
            observer=observer,
            order=order,
            ledger=self._ledger,
            budget=self._budget,
            waiting=self._waiting,
            tasks=self._tasks,
            changed=self._changed,
        )
        self._tail = LongTail(
            settings.tail, settings.tail_age, self._waiting, self._admission.capacity, self._tasks, self._ledger
        )
        self._is_running = self._is_over = False  # `run` was called; it ends

    @property
    def slots_held(self) -> int:
        return self._admission.slots.held

    @property
    def states(self) -> Mapping[GroupState, int]:
        """Groups that hold a slot, by what they do now."""
        return self._ledger.states

    @property
    def rollouts_in_flight(self) -> int:
        return self._admission.capacity.in_flight

    @property
    def next_index(self) -> int:
        """The data position: the sample number that is admitted next."""
        return self._admission.next_index

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
            admission = self._tasks.begin(self._admission.run, "admission")
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
        self._remove_stale()
        while not (indices := self._next_indices()):
            self._admission.drop_limits.check()
            self._tail.resume_if_due(
                self._batch_size,
                self._admission.next_version,
                more_can_come=self._admission.slots.free > 0 and self._budget.may_admit,
            )
            self._changed.clear()
            await self._changed.wait()
            self._check_going()
            self._remove_stale()
        self._tail.batch_formed(indices)
        leases = self._waiting.take_batch(indices)
        self._budget.hand_out(len(leases))
        groups = [lease.mark_training() for lease in leases]
        check_age(groups, self._admission.next_version, self._settings.age_bound, self._settings.max_staleness)
        self._admission.drop_limits.batch_found()
        if self._observer is not None:
            self._observer.batch(self._admission.next_version, indices)
        metrics = self._ledger.close_batch(groups, self._admission.next_version)
        step = step_from(self._admission.next_version)
        batch = GroupBatch(groups, self._admission.next_version, metrics, lambda: self._settle(leases, step))
        self._admission.next_version = step
        return batch

    def _remove_stale(self) -> None:
        """Take out the waiting groups that are too old for the next batch, and so for any later one."""
        self._drop_stale()
        self._admission.play_expired_again(self._admission.next_version - self._settings.age_bound)

    def _drop_stale(self) -> None:
        """Drop groups none of whose tokens is young enough to be trained on."""
        max_age = self._settings.max_token_age
        if max_age is None or self._settings.stale_groups == "mask" or self._waiting.has_batches_again:
            return
        for lease in self._waiting.take_stale(self._admission.next_version - max_age):
            self._admission.drop(lease, "too_stale", lease.group)

    def _next_indices(self) -> list[int]:
        """The groups of the next batch, if it can be had. A batch without a token to train is dropped."""
        while indices := self._waiting.next_batch(
            self._batch_size, self._admission.next_version, are_all=self._are_all
        ):
            if not self._is_masked(leases := self._waiting.leases(indices)):
                return indices
            for lease in leases:
                self._admission.drop(lease, "too_stale", lease.group)
        return []

    def _is_masked(self, leases: Sequence[Lease]) -> bool:
        """Whether all tokens of these groups are too old to be trained."""
        max_age = self._settings.max_token_age
        if max_age is None or self._waiting.has_batches_again:
            return False
        versions = [version for lease in leases if lease.group is not None for version in lease.group.versions]
        return bool(versions) and max(versions) < self._admission.next_version - max_age

    @property
    def _batch_size(self) -> int:
        return min(self._settings.groups_per_step, self._budget.left)

    @property
    def _are_all(self) -> bool:
        """No group can be admitted before the next batch is found."""
        return len(self._waiting) in (self._admission.slots.size, self._budget.left)

    def _settle(self, leases: Sequence[Lease], version: int) -> None:
        """The generators have pulled what was trained on these.

        Raises:
            RuntimeError: an earlier batch has not been released.
        """
        if version > self._admission.version + 1:
            raise RuntimeError(
                f"the batch of step {version} is released before that of step {self._admission.version + 1}; release "
                "batches in the order of their steps"
            )
        for lease in leases:
            lease.settle()
        self._admission.version = version
        for lease in self._tail.too_old(version):
            self._admission.cancel(lease, "too_old")
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

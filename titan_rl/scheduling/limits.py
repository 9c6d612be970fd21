"""Limits of admission: slots, rollouts in flight, the budget of groups, and the number of dropped or lost groups."""

from __future__ import annotations

import asyncio
from collections import Counter

from titan_rl.core.errors import TrainingError
from titan_rl.rollout.group.transcript import ErrorCounts
from titan_rl.rollout.types import RolloutGroup, RolloutStatus
from titan_rl.scheduling.filters import EQUAL_REWARDS_ADVICE, LOST
from titan_rl.scheduling.settings import SchedulingConfig


class SlotPool:
    """A fixed number of slots, each for one group, which are granted in the order of the requests."""

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ValueError(f"SlotPool.size is {size}; it must be at least 1")
        self.size = self.free = size
        self._slots = asyncio.Semaphore(size)

    async def acquire(self) -> None:
        await self._slots.acquire()
        self.free -= 1

    def release(self) -> None:
        self.free += 1
        self._slots.release()


class RolloutPermits:
    """Permits for the rollouts in flight of one group. Only permits that are still held can be given back."""

    def __init__(self, capacity: RolloutCapacity | None = None, count: int = 0) -> None:
        self.count = count
        self._capacity = capacity

    def keep(self, count: int) -> None:
        """Give back all permits beyond `count`."""
        surplus = self.count - count
        if surplus > 0 and self._capacity is not None:
            self.count = count
            self._capacity.give_back(surplus)


class RolloutCapacity:
    """Semaphore for rollouts in flight, with an optional limit. Groups get permits in the order of their requests."""

    def __init__(self, limit: int | None) -> None:
        self.in_flight = 0
        self._limit = limit
        self._freed = asyncio.Event()
        self._turn = asyncio.Lock()

    async def take(self, count: int) -> RolloutPermits:
        """Wait until `count` more rollouts fit, and take permits for them. A group larger than the limit starts when
        nothing else is in flight."""
        async with self._turn:
            while self._limit is not None and self.in_flight > 0 and self.in_flight + count > self._limit:
                self._freed.clear()
                await self._freed.wait()
            self.in_flight += count
        return RolloutPermits(self, count)

    def give_back(self, count: int) -> None:
        self.in_flight -= count
        self._freed.set()


class Budget:
    """Number of groups that are still to be admitted and handed out. A dropped group allows another admission.

    Attributes:
        left: Number of groups still to be handed out in batches.

    Raises:
        ValueError: `num_groups` is negative.
    """

    def __init__(self, num_groups: int) -> None:
        if num_groups < 0:
            raise ValueError(f"GroupScheduler budget is {num_groups}; it must not be negative")
        self.left = num_groups
        self._admissible = asyncio.Semaphore(num_groups)
        self._used_up = asyncio.Event()
        self.hand_out(0)

    @property
    def may_admit(self) -> bool:
        return not self._admissible.locked()

    async def admit(self) -> None:
        """Wait until another group may be admitted."""
        await self._admissible.acquire()

    def replace(self) -> None:
        """Allow another admission in place of a dropped group."""
        self._admissible.release()

    def hand_out(self, num_groups: int) -> None:
        """Count groups that are in a batch."""
        self.left = max(0, self.left - num_groups)
        if not self.left:
            self._used_up.set()

    async def wait_used_up(self) -> None:
        """Wait until all groups have been handed out."""
        await self._used_up.wait()


class DropLimits:
    """Limits that end a run without progress: groups dropped since the last batch, and groups lost to errors in a row.

    A group that was lost to errors counts only for the second limit, whose message names the error. The limits are
    `scheduling.max_refills` and `scheduling.max_failed_groups`.
    """

    def __init__(self, settings: SchedulingConfig) -> None:
        self._groups_per_step = settings.groups_per_step
        self._max_refills = settings.max_refills
        self._max_failed_groups = settings.max_failed_groups
        self._drops: Counter[str] = Counter()
        self._tasks: Counter[str] = Counter()  # tasks of the dropped groups
        self._num_unparsed = 0  # rollouts of dropped groups without a reward because their answer could not be parsed
        self._num_lost = 0  # groups lost to errors in a row
        self._errors = ErrorCounts()  # errors of the lost groups
        self._within = asyncio.Event()  # set while neither limit is reached
        self._within.set()

    def dropped(self, reason: str, group: RolloutGroup | None, task: str | None = None) -> None:
        """Count a dropped group.

        Args:
            reason: Reason of the drop.
            group: The group; None if it had not finished.
            task: Task of the group; None if the run has a single task.
        """
        self._drops[reason] += 1
        if task is not None:
            self._tasks[task] += 1
        if group is not None and reason == "too_few_siblings":
            self._num_unparsed += sum(
                rollout.status is RolloutStatus.ERROR_PARSE and rollout.reward is None for rollout in group.rollouts
            )
        self._update()

    def finished(self, group: RolloutGroup, reason: str | None) -> None:
        """Count a finished group.

        Args:
            group: The group.
            reason: Reason why the group is not trained on; None if it is.
        """
        if reason in LOST:
            self._num_lost += 1
            self._errors.add_group(group)
        else:
            self._num_lost, self._errors = 0, ErrorCounts()
        self._update()

    def batch_found(self) -> None:
        self._drops.clear()
        self._tasks.clear()
        self._num_unparsed = 0
        self._update()

    async def wait_within(self) -> None:
        """Wait until no limit is reached. At a limit no group is admitted until `next_batch` raises the error or finds
        a batch."""
        await self._within.wait()

    def check(self) -> None:
        """Raise if a limit is reached. Call while there is no batch.

        Raises:
            TrainingError: too many groups were dropped or lost.
        """
        if self._too_many_lost:
            text, count = self._errors.most_common()[0]
            raise TrainingError(
                f"{self._num_lost} groups in a row were lost to errors, {count} of their {self._errors.num_rollouts} "
                f"rollouts to {text}; rollouts.jsonl has more, and logs/controller.log the tracebacks; "
                f"scheduling.max_failed_groups = {self._max_failed_groups}"
            )
        if self._too_many_drops:
            reasons = ", ".join(f"{reason} ({count})" for reason, count in self._drops.most_common())
            tasks = ", ".join(f"{task} ({count})" for task, count in self._tasks.most_common())
            of_tasks = f", of the tasks {tasks}" if tasks else ""
            raise TrainingError(
                f"{self._drops.total()} groups in a row could not be trained on{of_tasks}: {reasons}; "
                f"{self._drop_advice()}"
            )

    def _drop_advice(self) -> str:
        most = next(reason for reason, _ in self._drops.most_common() if reason not in LOST)
        unparsed = (
            f"{self._num_unparsed} of their rollouts have an answer that could not be parsed, and no reward; "
            "give the Rubric an error_reward, the least that a wrong answer earns, to train on them"
        )
        if self._num_unparsed and most == "too_few_siblings":
            return unparsed  # more groups would not help
        equal = f"try: {EQUAL_REWARDS_ADVICE}; or " if most == "zero_variance" else ""
        unparsed = f"{unparsed}; or " if self._num_unparsed else ""
        return f"{equal}{unparsed}raise scheduling.max_refills = {self._max_refills} if this is expected"

    @property
    def _too_many_drops(self) -> bool:
        num_drops = sum(count for reason, count in self._drops.items() if reason not in LOST)
        return num_drops > self._max_refills * self._groups_per_step

    @property
    def _too_many_lost(self) -> bool:
        return self._num_lost >= self._max_failed_groups

    def _update(self) -> None:
        if self._too_many_drops or self._too_many_lost:
            self._within.clear()
        else:
            self._within.set()

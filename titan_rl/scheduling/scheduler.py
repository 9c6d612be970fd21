"""Which groups run now: bounded staleness by admission."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from titan_rl.errors import TrainingError
from titan_rl.rollout.types import RolloutGroup
from titan_rl.scheduling.slots import Slot, SlotPool

RunGroup = Callable[[int], Awaitable[RolloutGroup]]
"""Runs the group of training sample number `index` to its end."""

DropReason = Callable[[RolloutGroup], str | None]
"""Why a finished group cannot be trained on, or None if it can."""


@dataclass(slots=True)
class _Admitted:
    slot: Slot
    finished: asyncio.Future[RolloutGroup]


@dataclass(slots=True)
class GroupBatch:
    """The groups of one optimizer step, holding their slots until `release`."""

    groups: list[RolloutGroup]  # [groups_per_step], in data order
    dropped: Counter[str]  # reason -> groups that were left out on the way
    _slots: list[Slot]

    def release(self) -> None:
        """Give the slots back: call once, after the generators have pulled the version trained on these groups."""
        for slot in self._slots:
            slot.release()


class GroupScheduler:
    """Runs groups in data order and hands out batches in that order.

    With P groups a step and staleness S there are (S+1)P slots. A group holds one from its admission until the
    generators have pulled the version trained on it, so every token is trained on at most S versions after the one
    that sampled it: the bound is kept by admission, and nothing finished is thrown away. S=0 is strictly on-policy.

    Example: P=2, S=1 gives four slots. Groups 0-3 start at version 0. The step on 0 and 1 makes version 1; once the
    generators have it, groups 4 and 5 start, while the trainer may already take 2 and 3.

    `run` admits groups until it is cancelled or the budget is spent. An exception of a group ends `run` with it.

    Args:
        budget: groups to be trained on in the whole run; a dropped one is replaced.
        drop_reason: names what cannot be trained on. Such a group returns its slot at once.
        max_refills: a step that drops more than `max_refills * groups_per_step` groups ends the run.
        start_index: position in the data to begin at.
    """

    def __init__(
        self,
        run_group: RunGroup,
        *,
        groups_per_step: int,
        max_staleness: int,
        budget: int,
        drop_reason: DropReason = lambda group: None,
        max_refills: int = 4,
        start_index: int = 0,
    ) -> None:
        self._run_group = run_group
        self._groups_per_step = groups_per_step
        self._drop_reason = drop_reason
        self._max_drops = max_refills * groups_per_step
        self._slots = SlotPool((max_staleness + 1) * groups_per_step)
        self._budget = asyncio.Semaphore(budget)  # groups that may still be admitted
        self._next_index = start_index
        self._admitted: deque[_Admitted] = deque()
        self._admission = asyncio.Condition()

    @property
    def slots_held(self) -> int:
        return self._slots.held

    @property
    def next_index(self) -> int:
        """The data position: the sample number that is admitted next."""
        return self._next_index

    async def run(self) -> None:
        """Admit groups as slots come free. Cancelling it cancels every unfinished group."""
        async with asyncio.TaskGroup() as groups:
            while True:
                await self._budget.acquire()
                slot = await self._slots.acquire()
                entry = _Admitted(slot, asyncio.get_running_loop().create_future())
                async with self._admission:
                    self._admitted.append(entry)
                    self._admission.notify_all()
                groups.create_task(self._play(self._next_index, entry), name=f"group-{self._next_index}")
                self._next_index += 1

    async def _play(self, index: int, entry: _Admitted) -> None:
        group = await self._run_group(index)
        entry.finished.set_result(group)

    async def next_batch(self) -> GroupBatch:
        """The next `groups_per_step` usable groups in data order. Waits for the oldest; overtakes none.

        Raises:
            TrainingError: too many groups in a row were unusable; the message counts the reasons.
        """
        batch = GroupBatch([], Counter(), [])
        while len(batch.groups) < self._groups_per_step:
            async with self._admission:
                await self._admission.wait_for(lambda: self._admitted)
            group = await self._admitted[0].finished
            slot = self._admitted.popleft().slot
            if (reason := self._drop_reason(group)) is None:
                batch.groups.append(group)
                batch._slots.append(slot)  # pyright: ignore[reportPrivateUsage]
                continue
            slot.release()
            self._budget.release()
            batch.dropped[reason] += 1
            if batch.dropped.total() > self._max_drops:
                reasons = ", ".join(f"{reason} ({count})" for reason, count in batch.dropped.most_common())
                raise TrainingError(
                    f"{batch.dropped.total()} groups in a row could not be trained on: {reasons}; "
                    f"raise scheduling.max_refills if this is expected"
                )
        return batch

"""A lease: what a group has been given for the time from its admission until it is settled."""

from __future__ import annotations

import asyncio

from titan_rl.core.tracing.spans import Track
from titan_rl.rollout.types import Rollout, RolloutGroup
from titan_rl.scheduling.admission.capacity import RolloutCapacity, RolloutPermits
from titan_rl.scheduling.admission.slots import Slot
from titan_rl.scheduling.group_state import GroupState
from titan_rl.scheduling.ledger import Ledger
from titan_rl.scheduling.suspension import Suspension


class Lease:
    """What one group holds for a time and then gives back: a slot of the scheduler, and a permit for each sibling.

    It is handed to what runs the group, which generates through `suspension`, and says when a sibling is done.

    Its two parts end apart. The slot goes when the group is settled, which is when its step has been pulled or when it
    is dropped. The permits go as the rollouts end, also those of a dropped group that takes its time.

    Example:

        async def run_group(lease: Lease) -> RolloutGroup:
            generate = resume_on_abort(lease.suspension.guard(router.generate, router.abort),
                                       wait_until_resumed=lease.suspension.wait_resumed)
            return await rollouter.run_group(generate, sample_of(lease.index), on_finished=lease.rollout_finished, ...)
    """

    def __init__(self, index: int, slot: Slot, ledger: Ledger) -> None:
        self.index = index  # position in the data
        self.suspension = Suspension()
        self.version = -1  # newest one pulled when it started
        self.group: RolloutGroup | None = None  # when it has finished
        self._slot = slot
        self._ledger = ledger
        self._permits = RolloutPermits()
        self._unfinished = 0  # siblings
        self._finished: set[int] = set()  # siblings
        self._due = asyncio.Event()  # a suspended group may go on
        self._state: GroupState | None = None
        self._track = Track("slot", "scheduler")
        self._move(GroupState.PENDING)

    @property
    def state(self) -> GroupState | None:
        """None once it is settled."""
        return self._state

    def rollout_finished(self, rollout: Rollout) -> None:
        """One sibling is done, with all its seats; the next group may take its place."""
        if rollout.sibling not in self._finished:
            self._finished.add(rollout.sibling)
            self._unfinished = max(0, self._unfinished - 1)
            self._permits.keep(self._unfinished)

    def mark_running(self, permits: RolloutPermits, version: int) -> None:
        self._permits, self._unfinished, self.version = permits, permits.count, version
        self._move(GroupState.RUNNING)

    def suspend(self) -> None:
        """From now on no request of the group begins. `wait_suspended` is what follows."""
        self.suspension.suspend()
        self._due.clear()
        self._move(GroupState.SUSPENDED)

    async def wait_suspended(self, capacity: RolloutCapacity) -> None:
        """Free the engines, wait until the group is due, take permits again, and go on."""
        await self.suspension.abort_in_flight()
        self._permits.keep(0)
        await self._due.wait()
        if self._unfinished:
            permits = await capacity.take(self._unfinished)
            permits.keep(self._unfinished)  # fewer, if siblings ended while it waited
            self._permits = permits
        if self._state is GroupState.SUSPENDED:
            self._move(GroupState.RUNNING)
            self.suspension.resume()

    def let_resume(self) -> None:
        """A suspended group goes on as soon as there are permits."""
        self._due.set()

    def has_ended(self) -> None:
        """What ran the group has returned, or failed: no rollout of it is in flight."""
        self._unfinished = 0
        self._permits.keep(0)
        self._due.set()

    def mark_done(self, group: RolloutGroup) -> None:
        self.group = group
        self._move(GroupState.DONE)

    def begin_again(self) -> None:
        """Discard the finished group, which is about to be generated again in the same slot."""
        self.group = None
        self._finished.clear()
        self._move(GroupState.PENDING)

    def mark_training(self) -> RolloutGroup:
        assert self.group is not None, "only a finished group is trained on"
        self._move(GroupState.TRAINING)
        return self.group

    def settle(self) -> None:
        """Give the slot back, once."""
        self._slot.release()
        self._move(None)

    def _move(self, state: GroupState | None) -> None:
        self._ledger.move(self._state, state)
        self._state = state
        if state is None:
            self._track.close()
        else:
            self._track.enter(state, group=self.index)

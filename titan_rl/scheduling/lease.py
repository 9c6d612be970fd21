"""What a group holds from its admission until it is settled: a slot, and a place for each rollout in flight."""

from __future__ import annotations

import asyncio

from titan_rl.rollout.types import Rollout, RolloutGroup
from titan_rl.scheduling.capacity import RolloutCapacity
from titan_rl.scheduling.gate import Gate
from titan_rl.scheduling.ledger import GroupState, Ledger
from titan_rl.scheduling.slots import Slot


class Lease:
    """Handed to what runs the group: it plays through `gate`, and says when a sibling is done.

    Example:

        async def run_group(lease: Lease) -> RolloutGroup:
            generate = resume_on_abort(lease.gate.guard(router.generate, router.abort),
                                       wait_until_resumed=lease.gate.wait)
            return await rollouter.run_group(generate, sample_of(lease.index), on_finished=lease.rollout_finished, ...)
    """

    def __init__(self, index: int, slot: Slot, ledger: Ledger, capacity: RolloutCapacity) -> None:
        self.index = index  # position in the data
        self.gate = Gate()  # closed while the group is suspended
        self.version = -1  # newest one pulled when it started
        self.group: RolloutGroup | None = None  # when it has finished
        self.task: asyncio.Task[None] | None = None
        self._slot = slot
        self._ledger = ledger
        self._capacity = capacity
        self._in_flight = 0  # rollouts that have not finished
        self._state: GroupState | None = None
        self._move(GroupState.PENDING)

    @property
    def state(self) -> GroupState | None:
        return self._state

    def rollout_finished(self, rollout: Rollout) -> None:
        """One sibling is done; the next group may take its place."""
        self._land(1)

    def start(self, num_rollouts: int, version: int) -> None:
        """The capacity for its rollouts has been taken."""
        self._in_flight, self.version = num_rollouts, version
        self._move(GroupState.RUNNING)

    def suspend(self) -> None:
        """Give the places in flight back. What is in the engines has to be ended apart: `gate.end_in_flight`."""
        self.gate.close()
        self._capacity.give_back(self._in_flight)
        self._move(GroupState.SUSPENDED)

    def resume(self) -> None:
        self._capacity.take_again(self._in_flight)
        self._move(GroupState.RUNNING)
        self.gate.open()

    def finish(self, group: RolloutGroup) -> None:
        self.group = group
        self._land(self._in_flight)
        self._move(GroupState.DONE)

    def train(self) -> RolloutGroup:
        assert self.group is not None, "only a finished group is trained on"
        self._move(GroupState.TRAINING)
        return self.group

    def end(self) -> None:
        """Give everything back, once."""
        self._land(self._in_flight)
        self._slot.release()
        self._move(None)

    def _land(self, count: int) -> None:
        self._in_flight -= count
        if self._state is not GroupState.SUSPENDED:
            self._capacity.give_back(count)

    def _move(self, state: GroupState | None) -> None:
        self._ledger.move(self._state, state)
        self._state = state

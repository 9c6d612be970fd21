"""What becomes of the long tail: the groups that still run when later ones are trained on."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Literal

from titan_rl.scheduling.admission.capacity import RolloutCapacity
from titan_rl.scheduling.group_state import GroupState
from titan_rl.scheduling.lease import Lease
from titan_rl.scheduling.task_scope import TaskScope
from titan_rl.scheduling.waiting_groups import WaitingGroups

Tail = Literal["carry_over", "tail_batch", "drop"]


class LongTail:
    """Carries out a `tail`: "carry_over" leaves such a group alone, "drop" gives it up at an age, and "tail_batch"
    suspends it until there are others like it, so that the slowest run together.

    Args:
        max_age: versions pulled since its admission at which "drop" gives a group up.
        capacity: where a group that goes on takes its permits.
        tasks: in which suspended groups wait.
    """

    def __init__(
        self, tail: Tail, max_age: int, waiting: WaitingGroups, capacity: RolloutCapacity, tasks: TaskScope
    ) -> None:
        self._tail: Tail = tail
        self._max_age = max_age
        self._waiting = waiting
        self._capacity = capacity
        self._tasks = tasks

    def batch_formed(self, newest: int) -> None:
        """A batch whose newest group is `newest` has overtaken those before it that still run."""
        if self._tail != "tail_batch":
            return
        for lease in self._waiting:
            if lease.index < newest and lease.state is GroupState.RUNNING:
                lease.suspend()
                self._tasks.begin(partial(lease.wait_suspended, self._capacity), f"suspend-{lease.index}")

    def resume_if_due(self, batch_size: int, *, more_can_come: bool) -> None:
        """Suspended groups go on together: when they make a batch, or when none can be had without them.

        Args:
            more_can_come: a further group can be admitted.
        """
        suspended = [lease for lease in self._waiting if lease.state is GroupState.SUSPENDED]
        num_others = len(self._waiting.choose_not_suspended(batch_size))
        if len(suspended) >= batch_size or (num_others < batch_size and not more_can_come):
            for lease in suspended:
                lease.let_resume()

    def too_old(self, version: int) -> Iterable[Lease]:
        """Groups to be dropped when `version` has been pulled."""
        if self._tail != "drop":
            return []
        return [
            lease
            for lease in self._waiting
            if lease.state is GroupState.RUNNING and version - lease.version >= self._max_age
        ]

"""What becomes of the long tail: the groups that still run when later ones are trained on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Literal

from titan_rl.scheduling.admission.capacity import RolloutCapacity
from titan_rl.scheduling.batches.waiting_groups import WaitingGroups
from titan_rl.scheduling.group_state import GroupState
from titan_rl.scheduling.lease import Lease
from titan_rl.scheduling.ledger import Ledger
from titan_rl.scheduling.task_scope import TaskScope

Tail = Literal["carry_over", "tail_batch", "drop"]


class LongTail:
    """Carries out a `tail`: "carry_over" leaves such a group alone, "drop" gives it up at an age, and "tail_batch"
    suspends it until there are others like it, so that the slowest run together.

    Args:
        max_age: versions pulled since its admission at which "drop" gives a group up.
        capacity: where a group that goes on takes its permits.
        tasks: in which suspended groups wait.
        ledger: which counts them.
    """

    def __init__(
        self,
        tail: Tail,
        max_age: int,
        waiting: WaitingGroups,
        capacity: RolloutCapacity,
        tasks: TaskScope,
        ledger: Ledger,
    ) -> None:
        self._tail: Tail = tail
        self._max_age = max_age
        self._waiting = waiting
        self._capacity = capacity
        self._tasks = tasks
        self._ledger = ledger
        self._looked_at: tuple[int, int, int, bool] | None = None  # what `resume_if_due` goes by, when it last looked

    def batch_formed(self, indices: Sequence[int]) -> None:
        """A batch of these groups has overtaken those before them that still run."""
        if self._tail != "tail_batch":
            return
        for lease in self._waiting.overtaken_by(indices):
            lease.suspend()
            self._tasks.begin(partial(lease.wait_suspended, self._capacity), f"suspend-{lease.index}")

    def resume_if_due(self, batch_size: int, version: int, *, more_can_come: bool) -> None:
        """Suspended groups go on together: when they make a batch, or when none can be had without them.

        Args:
            version: that the next step starts from.
            more_can_come: a further group can be admitted.
        """
        if self._tail != "tail_batch" or not (num_suspended := self._ledger.states[GroupState.SUSPENDED]):
            return
        looked_at = self._waiting.num_changes, num_suspended, batch_size, more_can_come
        if looked_at == self._looked_at:  # another group has finished, which changes nothing
            return
        self._looked_at = looked_at
        if num_suspended >= batch_size or (not more_can_come and not self._waiting.could_give(batch_size, version)):
            for lease in self._waiting:
                if lease.state is GroupState.SUSPENDED:
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

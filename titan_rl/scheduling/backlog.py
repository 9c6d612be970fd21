"""Resuming a scheduler: its observer, which records groups, and the groups to restore from such a record."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from titan_rl.core.errors import ConfigError
from titan_rl.rollout.types import RolloutGroup
from titan_rl.scheduling.task_mix import TaskMix


@dataclass(frozen=True, slots=True)
class Backlog:
    """Groups before `next_index` that were neither trained nor dropped, with their state.

    Example: a run was lost when 5 and 7 had finished, 6 had not, and a step on 5 was not yet in a checkpoint:

        Backlog(next_index=8, unsettled=[5, 6, 7], finished={5: group_5, 7: group_7}, batches=[[5]])

    Raises:
        ValueError: an unsettled group is named twice, or is not before `next_index`.
    """

    next_index: int = 0
    unsettled: Sequence[int] = ()
    finished: Mapping[int, RolloutGroup] = field(default_factory=dict[int, RolloutGroup])
    batches: Sequence[Sequence[int]] = ()  # batches since the checkpoint, which are handed out again unchanged

    def __post_init__(self) -> None:
        if len(set(self.unsettled)) < len(self.unsettled):
            raise ValueError(f"Backlog.unsettled is {list(self.unsettled)}; each group may occur only once")
        if beyond := [index for index in self.unsettled if not 0 <= index < self.next_index]:
            raise ValueError(
                f"Backlog.unsettled has {beyond}; it must be of groups before next_index = {self.next_index}"
            )

    def check_admission(self, num_slots: int, budget: int) -> None:
        """Check that every batch can be handed out again. The groups of a batch are admitted first, so they must fit
        the slots.

        Args:
            num_slots: Maximum number of groups admitted and not yet trained on.
            budget: Number of groups that remain to be trained on.

        Raises:
            ConfigError: a batch does not fit, because the settings differ from those of the earlier run.
        """
        left = budget
        for batch in self.batches:
            if left <= 0:
                return
            if len(batch) > (room := min(num_slots, left)):
                raise ConfigError(
                    f"the batch of groups {list(batch)} cannot be trained again as it was: only {room} of its groups "
                    f"would start in the {num_slots} slots that scheduling.groups_per_step, max_staleness and "
                    f"oversample come to, with {left} groups more to train; resume with the run's earlier settings"
                )
            left -= len(batch)


class RestoreQueue:
    """Unsettled groups of a backlog that have not been admitted yet.

    The groups of the batches that are handed out again come first, then the others in the order of their turns. Data
    order is not enough with several tasks: a group that took the turn of a dropped one is late in the data but early in
    the turns, and the groups between would hold slots for more steps than the age bound allows.

    Args:
        backlog: Groups to restore.
        order: Tasks and turns of the groups; None for a single task in data order.
    """

    def __init__(self, backlog: Backlog, order: TaskMix | None) -> None:
        self._order = order
        self._left = dict.fromkeys(backlog.unsettled)
        self._batched = deque(index for batch in backlog.batches for index in batch)

    def take(self) -> int | None:
        """The group to admit next; None to admit a new one."""
        index = self._next() if self._left else None
        if index is not None:
            del self._left[index]
        return index

    def _next(self) -> int | None:
        while self._batched:
            if (index := self._batched.popleft()) in self._left:
                return index
        first = next(iter(self._left))
        if self._order is None:
            return first
        if (index := self._order.next_restored()) is not None:
            return index if index in self._left else first
        task_of = self._order.task_of
        return next((index for index in self._left if task_of(index) is None), None)  # a group whose records were lost


class SchedulerObserver(Protocol):
    """Records the scheduler events that a later run needs. `index` is a group's position in the data."""

    def finished(self, index: int, group: RolloutGroup) -> None:
        """A group has finished and will be in a batch."""
        ...

    def dropped(self, step: int, index: int, reason: str, group: RolloutGroup | None) -> None:
        """A group will be in no batch. Another one replaces it, in `step` at the earliest.

        Args:
            step: First step that the replacement can be part of.
            index: Position of the group in the data.
            reason: Reason of the drop.
            group: The group; None if it never finished.
        """
        ...

    def discarded(self, index: int, group: RolloutGroup) -> None:
        """A group of an earlier run is generated again, because its tokens are older than the bound. Its earlier
        records are void."""
        ...

    def batch(self, version: int, indices: Sequence[int]) -> None:
        """The step from `version` is trained on these groups."""
        ...

"""Where an earlier run of the same data stood, so that a scheduler goes on from there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from titan_rl.rollout.types import RolloutGroup


@dataclass(frozen=True, slots=True)
class Backlog:
    """The groups before `next_index` that are neither trained nor dropped, and what is known of them.

    Example: a run was lost when 5 and 7 had finished, 6 had not, and a step on 5 was not yet in a checkpoint:

        Backlog(next_index=8, unsettled=[5, 6, 7], finished={5: group_5, 7: group_7}, batches=[[5]])
    """

    next_index: int = 0
    unsettled: Sequence[int] = ()  # ascending
    finished: Mapping[int, RolloutGroup] = field(default_factory=dict[int, RolloutGroup])
    batches: Sequence[Sequence[int]] = ()  # handed out since, to be handed out again just so


class SchedulerObserver(Protocol):
    """Is told of what a scheduler must not forget, as it happens. A group is told of by its position in the data."""

    def finished(self, index: int, group: RolloutGroup) -> None:
        """It will be in a batch."""
        ...

    def dropped(self, index: int, reason: str, group: RolloutGroup | None) -> None:
        """It will be in none. `group` is None where it never finished."""
        ...

    def batch(self, version: int, indices: Sequence[int]) -> None:
        """What the step from `version` is trained on."""
        ...

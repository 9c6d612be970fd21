"""Who is told of what becomes of groups, so that a later run can go on from there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from titan_rl.rollout.types import RolloutGroup


class SchedulerObserver(Protocol):
    """Is told of what a scheduler must not forget, as it happens. A group is told of by its position in the data."""

    def finished(self, index: int, group: RolloutGroup) -> None:
        """It will be in a batch."""
        ...

    def dropped(self, step: int, index: int, reason: str, group: RolloutGroup | None) -> None:
        """It will be in none, and makes room for another, in `step` at the earliest. `group` is None where it never
        finished."""
        ...

    def discarded(self, index: int, group: RolloutGroup) -> None:
        """A group of an earlier run is generated again, because its tokens are older than the bound. Whatever is
        recorded of it no longer counts."""
        ...

    def batch(self, version: int, indices: Sequence[int]) -> None:
        """What the step from `version` is trained on."""
        ...

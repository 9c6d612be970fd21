"""What happens to the groups of a mix. With the state before, these say where a mix stands."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Assigned:
    """The group at a position in the data plays a sample of a task."""

    index: int
    task: str  # its name
    sample: int  # number of the task's training sample


@dataclass(frozen=True, slots=True)
class Result:
    """The group at a position has ended."""

    index: int
    rewards: tuple[float, ...]  # of its rollouts that have one


@dataclass(frozen=True, slots=True)
class Dropped:
    """The group at a position is not trained on."""

    index: int


MixEvent = Assigned | Result | Dropped

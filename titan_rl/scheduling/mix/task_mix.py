"""Which task the group at a position in the data is of, and with which of the task's samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from titan_rl.scheduling.mix.shares import Shares


@dataclass(frozen=True, slots=True)
class Assignment:
    """What the group at a position in the data plays."""

    task: str  # its name
    sample: int  # number of the task's training sample


class TaskMix:
    """Deals out the positions in the data to the tasks of a run, each its share of them.

    Args:
        weights: by the tasks' names.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._shares = Shares(weights)
        self._assignments: list[Assignment] = []

    def assignment(self, index: int) -> Assignment:
        """Of the group at a position; the same at every call."""
        while len(self._assignments) <= index:
            name = self._shares.next()
            self._assignments.append(Assignment(name, self._shares.taken[name]))
            self._shares.take(name)
        return self._assignments[index]

"""Which of a task's samples comes next, given what became of those before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

CurriculumState = dict[str, Any]
"""What a curriculum remembers. The run keeps it, and checkpoints hold it as JSON: names are strings, and what is below
them numbers, strings, lists, dicts, None."""


@runtime_checkable
class Curriculum(Protocol):
    """Chooses the samples of one task by their numbers. `curriculum = {type = "module:Class"}` of one of `[[tasks]]`
    names an implementation that is also a `titan_rl.core.settings.Section`; the other keys are its fields.

    It holds nothing itself: its methods are given a state, which the last two change in place. After a stop or a kill
    the state is what it was, without `next_sample` being asked again for the groups that there are.

    Example, every sample three times:

        class Thrice(Section):
            def begin(self):
                return {"given": 0}

            def next_sample(self, state):
                return state["given"] // 3

            def given(self, state, sample):
                state["given"] += 1

            def finished(self, state, sample, rewards):
                pass
    """

    def begin(self) -> CurriculumState:
        """The state before the first sample."""
        ...

    def next_sample(self, state: CurriculumState) -> int:
        """The number of the sample that the task's next group plays. Changes nothing."""
        ...

    def given(self, state: CurriculumState, sample: int) -> None:
        """A group is to play the sample. It is the one that `next_sample` said, but for a run that has lost part of its
        journal."""
        ...

    def finished(self, state: CurriculumState, sample: int, rewards: Sequence[float]) -> None:
        """A group that played the sample has ended, whether or not it is trained on. Groups end in any order.

        Args:
            rewards: of its rollouts that have one; none where all were lost to errors.
        """
        ...

"""Where a mix of tasks stands, and how a checkpoint says it."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from titan_rl.core.errors import CheckpointError
from titan_rl.rollout.task import calling
from titan_rl.scheduling.mix.curriculum import CurriculumState
from titan_rl.scheduling.mix.shares import Shares
from titan_rl.scheduling.mix.turns import TaskTurns

KEYS = frozenset({"weights", "taken", "places", "turns", "old_turns", "curricula", "open"})
"""Of what `Position.to_json` gives."""


@dataclass(slots=True)
class OpenGroup:
    """A group that is neither trained nor dropped."""

    task: str
    sample: int
    place: int  # among all groups of the task
    is_told: bool = False  # its curriculum knows how it ended
    in_batch: bool = False


@dataclass(slots=True)
class Position:
    """Where a mix stands: all that is needed to go on."""

    weights: dict[str, float]
    shares: Shares
    places: dict[str, int]  # groups that each task has had
    curricula: dict[str, CurriculumState]
    turns: TaskTurns = field(default_factory=TaskTurns)
    open: dict[int, OpenGroup] = field(default_factory=dict[int, OpenGroup])  # by position in the data

    def to_json(self) -> dict[str, Any]:
        """
        Raises:
            DataError: JSON has no word for the state of a curriculum.
        """
        return {
            "weights": dict(self.weights),
            "taken": dict(self.shares.taken),
            "places": dict(self.places),
            "turns": self.turns.all(),
            "old_turns": self.turns.num_old,
            "curricula": {name: json_copy(name, state) for name, state in self.curricula.items()},
            "open": [
                [index, group.task, group.sample, group.place, group.is_told]
                for index, group in sorted(self.open.items())
            ],
        }

    @classmethod
    def from_json(cls, state: Mapping[str, Any], tasks: Collection[str]) -> Position:
        """
        Args:
            state: what `to_json` gave.
            tasks: the names of those that the run has.

        Raises:
            CheckpointError: it is not one of these, or of other tasks.
        """
        if complaint := _complaint(state):
            raise _unreadable(complaint)
        if set(state["weights"]) != set(tasks):
            raise CheckpointError(
                f"the run was saved with the tasks {', '.join(state['weights'])}, and goes on with "
                f"{', '.join(tasks)}; name the tasks as they were"
            )
        try:
            position = cls(
                dict(state["weights"]),
                Shares(state["weights"], state["taken"]),
                dict(state["places"]),
                json.loads(json.dumps(state["curricula"])),
                TaskTurns(state["turns"], int(state["old_turns"])),
                {int(index): OpenGroup(*group) for index, *group in state["open"]},
            )
            for group in position.open.values():
                if not position.turns.fill(group.task):
                    raise ValueError(f"a group of task {group.task!r} has no turn")
            return position
        except (TypeError, ValueError) as error:
            raise _unreadable(str(error)) from error


def json_copy(name: str, state: CurriculumState) -> CurriculumState:
    """A copy of the state of a task's curriculum.

    Raises:
        DataError: it would not come back as it is.
    """
    with calling(f"the curriculum's state, {name!r},"):
        copy = json.loads(json.dumps(state, allow_nan=False))
        if copy != state:
            raise TypeError(f"{state!r} comes back from JSON as {copy!r}; names must be strings, and sequences lists")
    return copy


def _complaint(state: Mapping[str, Any]) -> str:
    """What is wrong with its keys, if anything is."""
    found = set(state)
    parts = [
        f"{what} {', '.join(map(repr, sorted(keys)))}"
        for what, keys in (("lacks", KEYS - found), ("has an unknown", found - KEYS))
        if keys
    ]
    if parts:
        return f"it {' and '.join(parts)}"
    for key in ("weights", "taken", "places", "curricula"):
        if not isinstance(state[key], dict) or set(state[key]) != set(state["weights"]):
            return f"{key!r} must be a table with an entry for each task"
    return ""


def _unreadable(complaint: str) -> CheckpointError:
    return CheckpointError(
        f"where the mix of tasks stood ('tasks' of run_state.json) cannot be read: {complaint}. Another version of "
        "titan_rl wrote it, or it was edited: go on with that version, or write the weights with titan-rl export and "
        "begin a run whose model.path they are"
    )

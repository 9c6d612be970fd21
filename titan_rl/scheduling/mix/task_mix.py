"""Which task the group at a position in the data is of, and which of the task's samples it plays."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from titan_rl.errors import CheckpointError
from titan_rl.rollout.task import calling
from titan_rl.scheduling.mix.curriculum import Curriculum, CurriculumState
from titan_rl.scheduling.mix.events import Assigned, Dropped, MixEvent, Result
from titan_rl.scheduling.mix.shares import Shares


@dataclass(frozen=True, slots=True)
class Share:
    """What one task has of a mix.

    Args:
        weight: its share of the groups is this in the sum of all weights.
    """

    weight: float
    curriculum: Curriculum


@dataclass(slots=True)
class _Open:
    """A group that is neither trained nor dropped."""

    task: str
    sample: int
    is_told: bool = False  # its curriculum knows how it ended


@dataclass(slots=True)
class _Position:
    """Where a mix stands: all that is needed to go on."""

    weights: dict[str, float]
    shares: Shares
    curricula: dict[str, CurriculumState]
    owed: list[str] = field(default_factory=list[str])  # tasks of groups that were dropped and have no substitute yet
    open: dict[int, _Open] = field(default_factory=dict[int, _Open])  # by position in the data


class TaskMix:
    """Deals out the positions in the data to the tasks of a run.

    Each task has its share of the groups that are trained on: a group that is dropped is replaced by one of its task.
    Turns are dealt without chance (`Shares`), and the samples of a task are chosen by its curriculum.

    What it does depends on the order in which groups end, so it tells of each thing that happens. `state` with the
    events since is where it stands: a mix that is given both goes on as this one.

    Args:
        tasks: by their names.
        note: takes what happens, as it happens.
        state: what `state` gave; by default nothing has happened.
        events: those noted since then, or what is left of them.
        is_settled: whether the group at a position was trained or dropped before `state` was taken.

    Raises:
        CheckpointError: the state is of other tasks.
        DataError: a curriculum failed.
    """

    def __init__(
        self,
        tasks: Mapping[str, Share],
        note: Callable[[MixEvent], None] = lambda event: None,
        *,
        state: Mapping[str, Any] | None = None,
        events: Iterable[MixEvent] = (),
        is_settled: Callable[[int], bool] = lambda index: False,
    ) -> None:
        self._tasks = tasks
        self._note = note
        self._unchecked = {(name, kind) for name in tasks for kind in (Assigned, Result)}
        weights = {name: share.weight for name, share in tasks.items()}
        self._at = self._position(state) if state else self._beginning(weights)
        for event in events:
            if not is_settled(event.index):
                self._apply(event)
        if self._at.weights != weights:  # what was dealt by others is not made up for
            self._at.weights, self._at.shares = weights, Shares(weights)

    def assignment(self, index: int) -> Assigned:
        """What the group at a position plays; the same at every call until it is settled."""
        if (group := self._at.open.get(index)) is None:
            task = self._at.owed[0] if self._at.owed else self._at.shares.next()
            event = Assigned(index, task, self._next_sample(task))
            self._happens(event)
            return event
        return Assigned(index, group.task, group.sample)

    def task_of(self, index: int) -> str | None:
        """Of the group at a position; None where it has not begun, or is settled."""
        return None if (group := self._at.open.get(index)) is None else group.task

    def finished(self, index: int, rewards: Sequence[float]) -> None:
        """The group at a position has ended, with these rewards. Its curriculum is told once."""
        if not self._at.open[index].is_told:
            self._happens(Result(index, tuple(rewards)))

    def dropped(self, index: int) -> None:
        """It is not trained on."""
        if index in self._at.open:  # else it had not begun
            self._happens(Dropped(index))

    def trained(self, indices: Iterable[int]) -> None:
        """They are in the weights. `state` has them no more."""
        for index in indices:
            self._at.open.pop(index, None)

    def state(self) -> dict[str, Any]:
        """Where it stands, as JSON has it.

        Raises:
            DataError: JSON has no word for the state of a curriculum.
        """
        at = self._at
        return {
            "weights": dict(at.weights),
            "taken": dict(at.shares.taken),
            "owed": list(at.owed),
            "curricula": {name: _as_json(name, curriculum) for name, curriculum in at.curricula.items()},
            "open": [[index, group.task, group.sample, group.is_told] for index, group in sorted(at.open.items())],
        }

    def _beginning(self, weights: dict[str, float]) -> _Position:
        curricula: dict[str, CurriculumState] = {}
        for name, share in self._tasks.items():
            with calling(f"curriculum.begin, {name!r}"):
                curricula[name] = share.curriculum.begin()
            _as_json(name, curricula[name])
        return _Position(weights, Shares(weights), curricula)

    def _position(self, state: Mapping[str, Any]) -> _Position:
        if set(state["weights"]) != set(self._tasks):
            raise CheckpointError(
                f"the run was saved with the tasks {', '.join(state['weights'])}, and goes on with "
                f"{', '.join(self._tasks)}; name the tasks as they were"
            )
        return _Position(
            dict(state["weights"]),
            Shares(state["weights"], state["taken"]),
            json.loads(json.dumps(state["curricula"])),
            list(state["owed"]),
            {index: _Open(task, sample, is_told) for index, task, sample, is_told in state["open"]},
        )

    def _happens(self, event: MixEvent) -> None:
        task = event.task if isinstance(event, Assigned) else self._at.open[event.index].task
        self._apply(event)
        if (task, type(event)) in self._unchecked:  # what cannot be saved is told of before there is much to save
            self._unchecked.discard((task, type(event)))
            _as_json(task, self._at.curricula[task])
        self._note(event)

    def _apply(self, event: MixEvent) -> None:
        """An event that is applied twice changes nothing, and neither does one of a group that is not known."""
        at = self._at
        group = at.open.get(event.index)
        match event:
            case Assigned(index, task, sample) if group is None:
                if task in at.owed:
                    at.owed.remove(task)
                else:
                    at.shares.take(task)
                with calling(f"curriculum.given({sample}), {task!r}"):
                    self._tasks[task].curriculum.given(at.curricula[task], sample)
                at.open[index] = _Open(task, sample)
            case Result(rewards=rewards) if group is not None and not group.is_told:
                group.is_told = True
                with calling(f"curriculum.finished({group.sample}, {list(rewards)}), {group.task!r}"):
                    self._tasks[group.task].curriculum.finished(at.curricula[group.task], group.sample, rewards)
            case Dropped(index) if group is not None:
                del at.open[index]
                at.owed.append(group.task)
            case _:
                pass

    def _next_sample(self, task: str) -> int:
        with calling(f"curriculum.next_sample, {task!r}"):
            sample: Any = self._tasks[task].curriculum.next_sample(self._at.curricula[task])
            if not isinstance(sample, int) or not 0 <= sample < 2**63:  # the journal keeps it in 64 bits
                raise TypeError(f"it gave {sample!r}; it must give the number of a sample, from 0 to 2**63 - 1")
        return sample


def _as_json(name: str, state: CurriculumState) -> CurriculumState:
    """A copy of the state.

    Raises:
        DataError: it would not come back as it is.
    """
    with calling(f"the curriculum's state, {name!r},"):
        copy = json.loads(json.dumps(state, allow_nan=False))
        if copy != state:
            raise TypeError(f"{state!r} comes back from JSON as {copy!r}; names must be strings, and sequences lists")
    return copy

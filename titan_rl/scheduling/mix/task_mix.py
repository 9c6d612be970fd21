"""Which task the group at a position in the data is of, and which of the task's samples it plays."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from titan_rl.rollout.task import calling
from titan_rl.scheduling.mix.curriculum import Curriculum, CurriculumState
from titan_rl.scheduling.mix.events import Assigned, Dropped, MixEvent, Result
from titan_rl.scheduling.mix.position import OpenGroup, Position, json_copy
from titan_rl.scheduling.mix.shares import Shares


@dataclass(frozen=True, slots=True)
class Share:
    """What one task has of a mix.

    Args:
        weight: its share of the groups is this in the sum of all weights.
    """

    weight: float
    curriculum: Curriculum


class TaskMix:
    """Deals out the positions in the data to the tasks of a run.

    Each task has its share of the groups that are trained on, whatever is dropped: it is the `TrainingOrder` of a
    scheduler. Turns are dealt without chance (`Shares`), and the samples of a task are chosen by its curriculum.

    What it does depends on the order in which groups end, so it tells of each thing that happens. `state` with the
    events since is where it stands: a mix that is given both goes on as this one.

    Args:
        tasks: by their names.
        note: takes what happens, as it happens.
        state: what `state` gave; by default nothing has happened.
        events: those noted since then, or what is left of them.
        is_settled: whether the group at a position was trained or dropped before `state` was taken.
        is_dropped: whether it was trained or dropped by the last of the events.

    Raises:
        CheckpointError: the state is of other tasks, or is not one that `state` gave.
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
        is_dropped: Callable[[int], bool] = lambda index: False,
    ) -> None:
        self._tasks = tasks
        self._note = note
        self._unchecked = {(name, kind) for name in tasks for kind in (Assigned, Result)}
        weights = {name: share.weight for name, share in tasks.items()}
        self._at = Position.from_json(state, tasks) if state else self._beginning(weights)
        for event in events:
            if not is_settled(event.index):
                self._apply(event)
        for index in [index for index in self._at.open if is_dropped(index)]:
            self._apply(Dropped(index))  # else its turn would wait for a group that nobody plays
        by_place = sorted(self._at.open, key=self.place_of)
        self._restored = {  # groups that are not admitted yet, by their task's order
            name: {index: None for index in by_place if self._at.open[index].task == name} for name in tasks
        }
        if self._at.weights != weights:  # what was dealt by others is not made up for
            self._at.weights, self._at.shares = weights, Shares(weights)
            self._at.turns.become_old()

    def assignment(self, index: int) -> Assigned:
        """What the group at a position plays; the same at every call until it is settled."""
        if (group := self._at.open.get(index)) is None:
            task = self._at.turns.first_free() or self._at.shares.next()
            event = Assigned(index, task, self._next_sample(task))
            self._happens(event)
            return event
        return Assigned(index, group.task, group.sample)

    def admitted(self, index: int) -> None:
        self._restored[self.assignment(index).task].pop(index, None)

    def next_restored(self) -> int | None:
        task = self._at.turns.first_free({name: len(groups) for name, groups in self._restored.items()})
        return None if task is None else next(iter(self._restored[task]), None)

    def turns(self, count: int) -> list[str]:
        return self._at.turns.next(count)

    def turns_before(self, task: str, number: int) -> int:
        return self._at.turns.before(task, number)

    def batched(self, indices: Iterable[int]) -> None:
        for index in indices:
            group = self._at.open[index]
            if not group.in_batch:
                group.in_batch = True
                self._at.turns.batched(group.task)

    def window(self, task: str, window: int) -> int:
        """With share w a task's next turn but k is at most (k + 1) / w, rounded up, after the one before."""
        if self._at.turns.num_old:
            return 1
        share = self._at.shares.of(task)
        return window if share == 1 else max(1, math.floor((window - 1) * share))

    def place_of(self, index: int) -> int:
        return self._at.open[index].place

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
            if (group := self._at.open.pop(index, None)) is not None:
                self._at.turns.take(group.task, in_batch=group.in_batch)

    def state(self) -> dict[str, Any]:
        """Where it stands, as JSON has it.

        Raises:
            DataError: JSON has no word for the state of a curriculum.
        """
        return self._at.to_json()

    def _beginning(self, weights: dict[str, float]) -> Position:
        curricula: dict[str, CurriculumState] = {}
        for name, share in self._tasks.items():
            with calling(f"curriculum.begin, {name!r}"):
                curricula[name] = share.curriculum.begin()
            json_copy(name, curricula[name])
        return Position(weights, Shares(weights), dict.fromkeys(weights, 0), curricula)

    def _happens(self, event: MixEvent) -> None:
        task = event.task if isinstance(event, Assigned) else self._at.open[event.index].task
        self._apply(event)
        if (task, type(event)) in self._unchecked:  # what cannot be saved is told of before there is much to save
            self._unchecked.discard((task, type(event)))
            json_copy(task, self._at.curricula[task])
        self._note(event)

    def _apply(self, event: MixEvent) -> None:
        """An event that is applied twice changes nothing, and neither does one of a group that is not known."""
        at = self._at
        group = at.open.get(event.index)
        match event:
            case Assigned(index, task, sample) if group is None:
                if not at.turns.fill(task):
                    at.shares.take(task)
                    at.turns.deal(task)
                with calling(f"curriculum.given({sample}), {task!r}"):
                    self._tasks[task].curriculum.given(at.curricula[task], sample)
                at.open[index] = OpenGroup(task, sample, at.places[task])
                at.places[task] += 1
            case Result(rewards=rewards) if group is not None and not group.is_told:
                group.is_told = True
                with calling(f"curriculum.finished({group.sample}, {list(rewards)}), {group.task!r}"):
                    self._tasks[group.task].curriculum.finished(at.curricula[group.task], group.sample, rewards)
            case Dropped(index) if group is not None:
                del at.open[index]
                at.turns.free(group.task, in_batch=group.in_batch)
            case _:
                pass

    def _next_sample(self, task: str) -> int:
        with calling(f"curriculum.next_sample, {task!r}"):
            state = self._at.curricula[task]
            place = self._at.places[task]
            is_checked = place & (place - 1) == 0  # 0, 1, 2, 4, 8 ...: a state may be large
            before = repr(state) if is_checked else ""
            sample: Any = self._tasks[task].curriculum.next_sample(state)
            if is_checked and repr(state) != before:
                raise TypeError("it changed the state, and may be asked again; `given` is what changes it")
            if not isinstance(sample, int) or not 0 <= sample < 2**63:  # the journal keeps it in 64 bits
                raise TypeError(f"it gave {sample!r}; it must give the number of a sample, from 0 to 2**63 - 1")
        return sample

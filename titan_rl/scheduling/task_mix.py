"""Mix of tasks: task and sample of the group at each position in the data. Turns are dealt by weight."""

from __future__ import annotations

import bisect
import heapq
import json
import math
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import islice, repeat
from typing import Any, Protocol

from titan_rl.core.errors import CheckpointError
from titan_rl.rollout.task import calling
from titan_rl.scheduling.curriculum import Curriculum, CurriculumState, VersionedCurriculum


class Shares:
    """Deterministic share of turns by weight: earliest eligible virtual deadline first.

    After n turns each name has had its share of n, to within one turn. The k-th turn of a name with share w, counted
    from 0, is eligible from turn k/w on, with its deadline at (k+1)/w.

    Example: weights of 2 and 1 give a, a, b, a, a, b, ...

    Args:
        weights: Positive weight of each name.
        taken: Number of turns that each name has had with these weights.
    """

    def __init__(self, weights: Mapping[str, float], taken: Mapping[str, int] | None = None) -> None:
        exact = {name: Fraction(weight) for name, weight in weights.items()}
        total = sum(exact.values())
        self._shares = {name: weight / total for name, weight in exact.items()}
        self.taken = dict.fromkeys(weights, 0) | dict(taken or {})

    def of(self, name: str) -> Fraction:
        """Share of a name in the turns, from 0 to 1."""
        return self._shares[name]

    def next(self) -> str:
        """Name whose turn is next."""
        turn = sum(self.taken.values())
        due = [name for name, share in self._shares.items() if self.taken[name] < share * (turn + 1)]
        return min(due, key=lambda name: (self.taken[name] + 1) / self._shares[name])

    def take(self, name: str) -> None:
        """Count a turn of a name."""
        self.taken[name] += 1


class TaskTurns:
    """Dealt turns in order, each for one group of a task to be trained on. Within a task, the first turns belong to the
    groups in a batch, the next ones to the other groups; the rest are free.

    Dealing, filling and taking a turn is O(1) in the number of turns.

    Args:
        tasks: Tasks of the initial turns, which have no groups yet, the next turn first.
        num_old: Number of initial turns that were dealt with other weights.
    """

    def __init__(self, tasks: Iterable[str] = (), num_old: int = 0) -> None:
        self._of_task: defaultdict[str, deque[int]] = defaultdict(deque)  # numbers of the turns, ascending
        self._num_filled: defaultdict[str, int] = defaultdict(int)
        self._num_batched: defaultdict[str, int] = defaultdict(int)
        self._dealt = self._old_before = 0  # turns dealt; turns with a number below `_old_before` are old
        self.num_old = num_old
        for task in tasks:
            self._of_task[task].append(self._dealt)
            self._dealt += 1
        self._old_before = num_old

    def __len__(self) -> int:
        return sum(map(len, self._of_task.values()))

    def deal(self, task: str) -> None:
        """Deal a turn that has a group."""
        self._of_task[task].append(self._dealt)
        self._dealt += 1
        self._num_filled[task] += 1

    def fill(self, task: str) -> bool:
        """Give a free turn of the task to a group. Returns False if no turn is free."""
        is_free = self._num_filled[task] < len(self._of_task[task])
        self._num_filled[task] += is_free
        return is_free

    def free(self, task: str, *, in_batch: bool) -> None:
        """Free the turn of a dropped group."""
        self._num_filled[task] -= 1
        self._num_batched[task] -= in_batch

    def first_free(self, without: Mapping[str, int] | None = None) -> str | None:
        """Task of the first free turn.

        Args:
            without: Number of groups at the end of each task that are not counted.
        """
        free = [
            (numbers[filled], task)
            for task, numbers in self._of_task.items()
            if (filled := self._num_filled[task] - (without or {}).get(task, 0)) < len(numbers)
        ]
        return min(free)[1] if free else None

    def batched(self, task: str) -> None:
        """Count a group of the task that is in a batch."""
        self._num_batched[task] += 1

    def take(self, task: str, *, in_batch: bool) -> None:
        """Remove the first turn of the task, whose group was trained on."""
        number = self._of_task[task].popleft()
        self.free(task, in_batch=in_batch)
        self.num_old -= number < self._old_before

    def become_old(self) -> None:
        """Mark all turns as dealt with other weights."""
        self.num_old, self._old_before = len(self), self._dealt

    def next(self, count: int) -> list[str]:
        """Tasks of the first `count` turns that are not in a batch, or of as many as there are."""
        return self._merged(self._num_batched, count)

    def before(self, task: str, number: int) -> int:
        """Number of turns before a task's turn, without turns in a batch.

        Args:
            task: Task of the turn.
            number: Number of the task's own turns before it.
        """
        turn = self._of_task[task][self._num_batched[task] + number]
        return sum(
            bisect.bisect_left(numbers, turn) - self._num_batched[other] for other, numbers in self._of_task.items()
        )

    def all(self) -> list[str]:
        """Tasks of all turns."""
        return self._merged({}, len(self))

    def _merged(self, left_out: Mapping[str, int], count: int) -> list[str]:
        of_tasks = (
            zip(islice(numbers, left_out.get(task, 0), None), repeat(task), strict=False)
            for task, numbers in self._of_task.items()
        )
        return [task for _, task in islice(heapq.merge(*of_tasks), count)]


@dataclass(frozen=True, slots=True)
class Assigned:
    """Event: the group at a position in the data was assigned a sample of a task."""

    index: int
    task: str  # name of the task
    sample: int  # index of the task's training sample


@dataclass(frozen=True, slots=True)
class Result:
    """Event: the group at a position has ended."""

    index: int
    rewards: tuple[float, ...]  # rewards of its rollouts, without those that have none


@dataclass(frozen=True, slots=True)
class Dropped:
    """Event: the group at a position was dropped."""

    index: int


MixEvent = Assigned | Result | Dropped


KEYS = frozenset({"weights", "taken", "places", "turns", "old_turns", "curricula", "open"})
"""Keys of `MixState.to_json`."""


@dataclass(slots=True)
class OpenGroup:
    """A group that is neither trained nor dropped."""

    task: str
    sample: int
    task_index: int  # index among all groups of the task
    has_result: bool = False  # whether its curriculum has received its result
    in_batch: bool = False


@dataclass(slots=True)
class MixState:
    """State of a mix, from which it can continue."""

    weights: dict[str, float]
    shares: Shares
    num_assigned: dict[str, int]  # number of groups that each task has had
    curricula: dict[str, CurriculumState]
    turns: TaskTurns = field(default_factory=TaskTurns)
    open: dict[int, OpenGroup] = field(default_factory=dict[int, OpenGroup])  # by position in the data

    def to_json(self) -> dict[str, Any]:
        """State as JSON values.

        Raises:
            DataError: the state of a curriculum cannot be written as JSON.
        """
        return {
            "weights": dict(self.weights),
            "taken": dict(self.shares.taken),
            "places": dict(self.num_assigned),
            "turns": self.turns.all(),
            "old_turns": self.turns.num_old,
            "curricula": {name: json_copy(name, state) for name, state in self.curricula.items()},
            "open": [
                [index, group.task, group.sample, group.task_index, group.has_result]
                for index, group in sorted(self.open.items())
            ],
        }

    @classmethod
    def from_json(cls, state: Mapping[str, Any], tasks: Collection[str]) -> MixState:
        """State from the result of `to_json`.

        Args:
            state: Result of `to_json`.
            tasks: Names of the run's tasks.

        Raises:
            CheckpointError: `state` is damaged, or has other tasks.
        """
        if complaint := _complaint(state):
            raise _unreadable(complaint)
        if set(state["weights"]) != set(tasks):
            raise CheckpointError(
                f"the run was saved with the tasks {', '.join(state['weights'])}, and continues with "
                f"{', '.join(tasks)}; restore the names of the tasks"
            )
        try:
            restored = cls(
                dict(state["weights"]),
                Shares(state["weights"], state["taken"]),
                dict(state["places"]),
                json.loads(json.dumps(state["curricula"])),
                TaskTurns(state["turns"], int(state["old_turns"])),
                {int(index): OpenGroup(*group) for index, *group in state["open"]},
            )
            for group in restored.open.values():
                if not restored.turns.fill(group.task):
                    raise ValueError(f"a group of task {group.task!r} has no turn")
            return restored
        except (TypeError, ValueError) as error:
            raise _unreadable(str(error)) from error


def json_copy(name: str, state: CurriculumState) -> CurriculumState:
    """Copy of the state of a task's curriculum, made through JSON.

    Raises:
        DataError: the state cannot be written as JSON, or the copy differs from it.
    """
    with calling(f"the curriculum's state, {name!r},"):
        copy = json.loads(json.dumps(state, allow_nan=False))
        if copy != state:
            raise TypeError(f"{state!r} comes back from JSON as {copy!r}; names must be strings, and sequences lists")
    return copy


def _complaint(state: Mapping[str, Any]) -> str:
    """Problem with the keys of a state; empty if there is none."""
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
        f"the state of the task mix ('tasks' of run_state.json) cannot be read: {complaint}. Another version of "
        "titan_rl wrote it, or it was edited: continue with that version, or write the weights with titan-rl export "
        "and start a run with them as model.path"
    )


class MixObserver(Protocol):
    """Records the events of a mix, from which a later run restores it."""

    def note(self, event: MixEvent) -> None: ...


@dataclass(frozen=True, slots=True)
class WeightedTask:
    """Weight and curriculum of one task in a mix.

    Args:
        weight: Weight of the task. Divided by the sum of all weights, it is the task's share of the groups.
        curriculum: Chooses the samples of the task.
    """

    weight: float
    curriculum: Curriculum


class TaskMix:
    """Assigns the positions in the data to the tasks of a run, and orders their training.

    Each task has its share of the groups that are trained on, regardless of drops. A batch takes the first turns, and
    for each of them a group of the turn's task. A turn is dealt when a group is admitted, deterministically by weight
    (`Shares`), and stays when that group is dropped: the next group to be admitted fills the first free turn. There are
    therefore never more turns than slots, and with data order within each task a group is trained on no later than the
    turn for which it was admitted. The samples of a task are chosen by its curriculum.

    The mix depends on the order in which groups end, so it reports each event. A mix that is made from a result of
    `state` and the events after it continues like the original.

    Args:
        tasks: Weight and curriculum of each task, by the task's name.
        observer: Records the events.
        state: Earlier result of `state`; by default the mix starts from the beginning.
        events: Known events after that state, without those of groups that were trained or dropped before it.
        is_dropped: Whether the group at a position was trained or dropped by the time of the last event.

    Raises:
        CheckpointError: the state is damaged, or has other tasks.
        DataError: a curriculum failed.
    """

    def __init__(
        self,
        tasks: Mapping[str, WeightedTask],
        observer: MixObserver | None = None,
        *,
        state: Mapping[str, Any] | None = None,
        events: Iterable[MixEvent] = (),
        is_dropped: Callable[[int], bool] = lambda index: False,
    ) -> None:
        self._tasks = tasks
        self._observer = observer
        self._unchecked = {(name, kind) for name in tasks for kind in (Assigned, Result)}
        weights = {name: share.weight for name, share in tasks.items()}
        self._state = MixState.from_json(state, tasks) if state else self._beginning(weights)
        for event in events:
            self._apply(event)
        for index in [index for index in self._state.open if is_dropped(index)]:
            self._apply(Dropped(index))  # otherwise its turn would wait for a group that never runs
        # groups that are not admitted yet, by task, in the order of their task indices
        self._restored: dict[str, dict[int, None]] = {name: {} for name in tasks}
        for index, group in sorted(self._state.open.items(), key=lambda item: item[1].task_index):
            self._restored[group.task][index] = None
        if self._state.weights != weights:  # turns dealt with other weights are not compensated
            self._state.weights, self._state.shares = weights, Shares(weights)
            self._state.turns.become_old()

    def assignment(self, index: int) -> Assigned:
        """Task and sample of the group at a position; the same at every call until it is settled."""
        if (group := self._state.open.get(index)) is None:
            task = self._state.turns.first_free() or self._state.shares.next()
            event = Assigned(index, task, self._next_sample(task))
            self._happens(event)
            return event
        return Assigned(index, group.task, group.sample)

    def admitted(self, index: int) -> OpenGroup:
        """Note that the group at a position has a slot."""
        self._restored[self.assignment(index).task].pop(index, None)
        return self._state.open[index]

    def next_restored(self) -> int | None:
        """Position of the group of an earlier run to admit next: the group of the first turn without an admitted group.

        None if that turn is free, or there are no turns; then a new group must be admitted. This ensures that fewer
        turns precede an admitted group than there are slots.
        """
        task = self._state.turns.first_free({name: len(groups) for name, groups in self._restored.items()})
        return None if task is None else next(iter(self._restored[task]), None)

    def turns(self, count: int) -> list[str]:
        """Tasks of the next `count` turns that are not in a batch, or of as many as there are, the next one first."""
        return self._state.turns.next(count)

    def turns_before(self, task: str, number: int) -> int:
        """Number of turns that are not in a batch before a task's turn; see `TaskTurns.before`."""
        return self._state.turns.before(task, number)

    def batched(self, indices: Iterable[int]) -> None:
        """Note that groups are in a batch."""
        for index in indices:
            group = self._state.open[index]
            if not group.in_batch:
                group.in_batch = True
                self._state.turns.batched(group.task)

    @property
    def has_old_turns(self) -> bool:
        """Whether some turns were dealt with earlier weights."""
        return self._state.turns.num_old > 0

    def window(self, task: str, window: int) -> int:
        """Window of a task, counted in its own groups, such that no group of another task is delayed by `window`
        turns.

        With share w, k + 1 turns of a task span at most (k + 1) / w turns, rounded up.
        """
        if self.has_old_turns:
            return 1
        share = self._state.shares.of(task)
        return window if share == 1 else max(1, math.floor((window - 1) * share))

    def task_of(self, index: int) -> str | None:
        """Task of the group at a position; None if it has not begun, or is settled."""
        return None if (group := self._state.open.get(index)) is None else group.task

    def finished(self, index: int, rewards: Sequence[float]) -> None:
        """Note that the group at a position has ended with these rewards. Its curriculum receives them once."""
        if not self._state.open[index].has_result:
            self._happens(Result(index, tuple(rewards)))

    def dropped(self, index: int) -> None:
        """Note that the group at a position is not trained on."""
        if index in self._state.open:  # otherwise it had not begun
            self._happens(Dropped(index))

    def frozen(self, task: str, version: int) -> None:
        """Add a version to the league of a task. The caller repeats this if the run resumes from a checkpoint before
        that version."""
        state = self._state.curricula[task]
        curriculum = self._tasks[task].curriculum
        assert isinstance(curriculum, VersionedCurriculum)
        curriculum.frozen(state, version)

    def trained(self, indices: Iterable[int]) -> None:
        """Remove groups that the saved weights were trained on; `state` leaves them out."""
        for index in indices:
            if (group := self._state.open.pop(index, None)) is not None:
                self._state.turns.take(group.task, in_batch=group.in_batch)

    def state(self) -> dict[str, Any]:
        """State of the mix as JSON values.

        Raises:
            DataError: the state of a curriculum cannot be written as JSON.
        """
        return self._state.to_json()

    def curriculum_state(self, task: str) -> CurriculumState:
        """Copy of the state of a task's curriculum."""
        return json_copy(task, self._state.curricula[task])

    def _beginning(self, weights: dict[str, float]) -> MixState:
        curricula: dict[str, CurriculumState] = {}
        for name, share in self._tasks.items():
            with calling(f"curriculum.begin, {name!r}"):
                curricula[name] = share.curriculum.begin()
            json_copy(name, curricula[name])
        return MixState(weights, Shares(weights), dict.fromkeys(weights, 0), curricula)

    def _happens(self, event: MixEvent) -> None:
        task = event.task if isinstance(event, Assigned) else self._state.open[event.index].task
        self._apply(event)
        if (task, type(event)) in self._unchecked:  # fail early on a state that cannot be saved
            self._unchecked.discard((task, type(event)))
            json_copy(task, self._state.curricula[task])
        if self._observer is not None:
            self._observer.note(event)

    def _apply(self, event: MixEvent) -> None:
        """Apply an event. A repeated event, or one of an unknown group, changes nothing."""
        state = self._state
        group = state.open.get(event.index)
        match event:
            case Assigned(index, task, sample) if group is None:
                if not state.turns.fill(task):
                    state.shares.take(task)
                    state.turns.deal(task)
                with calling(f"curriculum.given({sample}), {task!r}"):
                    self._tasks[task].curriculum.given(state.curricula[task], sample)
                state.open[index] = OpenGroup(task, sample, state.num_assigned[task])
                state.num_assigned[task] += 1
            case Result(rewards=rewards) if group is not None and not group.has_result:
                group.has_result = True
                with calling(f"curriculum.finished({group.sample}, {list(rewards)}), {group.task!r}"):
                    self._tasks[group.task].curriculum.finished(state.curricula[group.task], group.sample, rewards)
            case Dropped(index) if group is not None:
                del state.open[index]
                state.turns.free(group.task, in_batch=group.in_batch)
            case _:
                pass

    def _next_sample(self, task: str) -> int:
        with calling(f"curriculum.next_sample, {task!r}"):
            state = self._state.curricula[task]
            num_assigned = self._state.num_assigned[task]
            is_checked = num_assigned & (num_assigned - 1) == 0  # 0, 1, 2, 4, 8 ...: a state may be large
            before = repr(state) if is_checked else ""
            sample: Any = self._tasks[task].curriculum.next_sample(state)
            if is_checked and repr(state) != before:
                raise TypeError(
                    "it changed the state, and may be called again; only `given` and `finished` may change it"
                )
            if not isinstance(sample, int) or not 0 <= sample < 2**63:  # the journal stores it in 64 bits
                raise TypeError(f"it returned {sample!r}; it must return the number of a sample, from 0 to 2**63 - 1")
        return sample

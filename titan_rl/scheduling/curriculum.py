"""Curricula: the choice of a task's next sample, given the results of earlier samples."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import takewhile
from operator import itemgetter
from statistics import fmean
from typing import Any, Protocol, Self, runtime_checkable

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from titan_rl.core.settings import Section

CurriculumState = dict[str, Any]
"""State of a curriculum. The run keeps it, and checkpoints contain it as JSON: keys are strings; values are numbers,
strings, lists, dicts or None."""


@runtime_checkable
class Curriculum(Protocol):
    """Chooses the samples of one task by their numbers. `curriculum = {type = "module:Class"}` of one of `[[tasks]]`
    names an implementation that is also a `titan_rl.core.settings.Section`; the other keys are its fields.

    A curriculum is stateless: its methods receive a state, which `given` and `finished` change in place. After a stop
    or a kill the state is restored, without another call of `next_sample` for groups that already have their samples.

    Example: a curriculum that gives every sample three times:

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
        """State before the first sample."""
        ...

    def next_sample(self, state: CurriculumState) -> int:
        """Index of the sample for the task's next group. Must not change the state."""
        ...

    def given(self, state: CurriculumState, sample: int) -> None:
        """Record that a group was given a sample. The sample is the result of `next_sample`, unless part of the journal
        was lost."""
        ...

    def finished(self, state: CurriculumState, sample: int, rewards: Sequence[float]) -> None:
        """Record that a group of the sample has ended, whether or not it is trained on. Groups end in any order.

        Args:
            state: State of the curriculum, which is changed in place.
            sample: Index of the sample.
            rewards: Rewards of the group's rollouts; empty if all were lost to errors.
        """
        ...


@runtime_checkable
class VersionedCurriculum(Curriculum, Protocol):
    """Curriculum that also chooses opponents among frozen versions of the policy."""

    def frozen(self, state: CurriculumState, version: int) -> None:
        """Record in the state that a version can be chosen from now on. Adding a version twice changes nothing."""
        ...


class InOrder(Section):
    """Each sample once, in the order of their numbers."""

    def begin(self) -> CurriculumState:
        return {"next": 0, "beyond": []}

    def next_sample(self, state: CurriculumState) -> int:
        return state["next"]

    def given(self, state: CurriculumState, sample: int) -> None:
        beyond: list[int] = state["beyond"]  # samples given out of order because a record of the journal was lost
        if sample >= state["next"]:
            beyond.append(sample)
        while state["next"] in beyond:
            beyond.remove(state["next"])
            state["next"] += 1

    def finished(self, state: CurriculumState, sample: int, rewards: Sequence[float]) -> None:
        pass


class ByDifficulty(Section):
    """Repeated passes through the first samples. A sample that is too easy or too hard to learn from, by the mean
    reward of its last group, is left out for some passes."""

    samples: PositiveInt
    """Number of samples in a pass, in the order of their numbers."""
    too_hard: float = 0.0
    """A mean reward of this or less leaves a sample out."""
    too_easy: float = 1.0
    """A mean reward of this or more leaves a sample out."""
    left_out: NonNegativeInt = 3
    """Number of passes for which a sample is left out. Then it is tried again."""

    @model_validator(mode="after")
    def _ends_are_apart(self) -> Self:
        if self.too_hard >= self.too_easy:
            raise ValueError(f"too_hard = {self.too_hard:g} must be less than too_easy = {self.too_easy:g}")
        return self

    def begin(self) -> CurriculumState:
        return {"pass": 0, "next": 0, "due": {}, "out": []}

    def next_sample(self, state: CurriculumState) -> int:
        return self._search(state)[1]

    def given(self, state: CurriculumState, sample: int) -> None:
        number, found = self._search(state)
        if found != sample:
            return
        for back in list(_due_by(state, number)):
            _take_back(state, back)
        state["pass"], state["next"] = number, sample + 1

    def finished(self, state: CurriculumState, sample: int, rewards: Sequence[float]) -> None:
        if not rewards or sample >= self.samples:
            return
        is_out = str(sample) in state["due"]
        if self.too_hard < fmean(rewards) < self.too_easy:
            if is_out:
                _take_back(state, sample)
            return
        if not is_out:
            _leave_out(state["out"], sample)
        state["due"].pop(str(sample), None)  # samples return in the order in which they were left out
        state["due"][str(sample)] = state["pass"] + 1 + self.left_out

    def _search(self, state: CurriculumState) -> tuple[int, int]:
        """(pass, sample) of the next sample that is due. O(log samples) within a pass; at its end, O(number of
        returning samples)."""
        number: int = state["pass"]
        if (sample := _first_in(state["out"], state["next"])) < self.samples:
            return number, sample
        number += 1
        if len(state["due"]) == self.samples:
            number = max(number, next(iter(state["due"].values())))
        return number, min((*_due_by(state, number), _first_in(state["out"], 0)))


def _due_by(state: CurriculumState, number: int) -> Iterator[int]:
    """Samples that return in this pass or earlier. `due` has them in the order in which they return."""
    return (int(sample) for sample, _ in takewhile(lambda entry: entry[1] <= number, state["due"].items()))


def _first_in(out: list[list[int]], sample: int) -> int:
    """First sample, from `sample` on, that is not left out.

    Args:
        out: Samples that are left out, as ascending ranges [first, end) that neither overlap nor touch.
        sample: First candidate.
    """
    at = bisect_right(out, sample, key=itemgetter(0)) - 1
    return max(sample, out[at][1]) if at >= 0 else sample


def _leave_out(out: list[list[int]], sample: int) -> None:
    """Add a sample to the ranges of samples that are left out."""
    at = bisect_right(out, sample, key=itemgetter(0))
    first, end = sample, sample + 1
    if at < len(out) and out[at][0] == end:
        end = out.pop(at)[1]
    if at > 0 and out[at - 1][1] == first:
        out[at - 1][1] = end
    else:
        out.insert(at, [first, end])


def _take_back(state: CurriculumState, sample: int) -> None:
    """Remove a sample from the ranges of samples that are left out, so that it is used again."""
    del state["due"][str(sample)]
    out: list[list[int]] = state["out"]
    at = bisect_right(out, sample, key=itemgetter(0)) - 1
    first, end = out[at]
    out[at : at + 1] = [part for part in ([first, sample], [sample + 1, end]) if part[0] < part[1]]


class Stages(Section):
    """Stages of samples: the next stage begins once the policy does well enough at the current one. The samples of a
    stage are repeated in the order of their numbers."""

    sizes: tuple[PositiveInt, ...] = Field(min_length=1, strict=False)
    """Number of samples of each stage: [500, 1000] has samples 0 to 499, then 500 to 1499."""
    threshold: float
    """A stage ends at this mean reward ..."""
    window: PositiveInt = 64
    """... over this number of its groups, those that ended last. The last stage never ends."""

    def begin(self) -> CurriculumState:
        return {"stage": 0, "next": 0, "means": []}

    def next_sample(self, state: CurriculumState) -> int:
        return state["next"]

    def given(self, state: CurriculumState, sample: int) -> None:
        first, end = self._range(state)
        if first <= sample < end:  # otherwise the sample is of another stage, because a record of the journal was lost
            state["next"] = first if sample + 1 == end else sample + 1

    def finished(self, state: CurriculumState, sample: int, rewards: Sequence[float]) -> None:
        first, end = self._range(state)
        if not rewards or not first <= sample < end:
            return
        state["means"] = [*state["means"], fmean(rewards)][-self.window :]
        is_last = state["stage"] + 1 == len(self.sizes)
        if not is_last and len(state["means"]) == self.window and fmean(state["means"]) >= self.threshold:
            state.update({"stage": state["stage"] + 1, "next": end, "means": []})

    def _range(self, state: CurriculumState) -> tuple[int, int]:
        """First sample of the current stage, and the first sample after it."""
        stage: int = state["stage"]
        first = sum(self.sizes[:stage])
        return first, first + self.sizes[stage]


CURRICULA: dict[str, type[Section]] = {"in_order": InOrder, "by_difficulty": ByDifficulty, "stages": Stages}
"""Built-in curricula that `curriculum = {type = ...}` can name."""

"""The library's own curricula. Each is the table of its settings, too."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import takewhile
from operator import itemgetter
from statistics import fmean
from typing import Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from titan_rl.core.settings import Section
from titan_rl.scheduling.mix.curriculum import CurriculumState


class InOrder(Section):
    """Each sample once, by their numbers."""

    def begin(self) -> CurriculumState:
        return {"next": 0, "beyond": []}

    def next_sample(self, state: CurriculumState) -> int:
        return state["next"]

    def given(self, state: CurriculumState, sample: int) -> None:
        beyond: list[int] = state["beyond"]  # given before their turn, since a record of the journal was lost
        if sample >= state["next"]:
            beyond.append(sample)
        while state["next"] in beyond:
            beyond.remove(state["next"])
            state["next"] += 1

    def finished(self, state: CurriculumState, sample: int, rewards: Sequence[float]) -> None:
        pass


class ByDifficulty(Section):
    """Goes through the first samples again and again, and leaves out for some passes those that are too easy or too
    hard to learn from: whose last group had a mean reward at one of the ends."""

    samples: PositiveInt
    """So many are gone through, in the order of their numbers."""
    too_hard: float = 0.0
    """A mean reward of this or less leaves a sample out."""
    too_easy: float = 1.0
    """A mean reward of this or more leaves a sample out."""
    left_out: NonNegativeInt = 3
    """For so many passes it is. Then it is tried again."""

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
        state["due"].pop(str(sample), None)  # the last that was left out is the last to come back
        state["due"][str(sample)] = state["pass"] + 1 + self.left_out

    def _search(self, state: CurriculumState) -> tuple[int, int]:
        """(pass, sample) of the next one that is due. O(log samples) within a pass, and at its end O(those that come
        back), each of which a group will play."""
        number: int = state["pass"]
        if (sample := _first_in(state["out"], state["next"])) < self.samples:
            return number, sample
        number += 1
        if len(state["due"]) == self.samples:
            number = max(number, next(iter(state["due"].values())))
        return number, min((*_due_by(state, number), _first_in(state["out"], 0)))


def _due_by(state: CurriculumState, number: int) -> Iterator[int]:
    """The samples that are left out no longer in a pass. `due` has them in the order in which they come back."""
    return (int(sample) for sample, _ in takewhile(lambda entry: entry[1] <= number, state["due"].items()))


def _first_in(out: list[list[int]], sample: int) -> int:
    """The first sample from one on that is not left out.

    Args:
        out: those that are, as ranges [first, end) that neither overlap nor touch, ascending.
    """
    at = bisect_right(out, sample, key=itemgetter(0)) - 1
    return max(sample, out[at][1]) if at >= 0 else sample


def _leave_out(out: list[list[int]], sample: int) -> None:
    """Add a sample to the ranges."""
    at = bisect_right(out, sample, key=itemgetter(0))
    first, end = sample, sample + 1
    if at < len(out) and out[at][0] == end:
        end = out.pop(at)[1]
    if at > 0 and out[at - 1][1] == first:
        out[at - 1][1] = end
    else:
        out.insert(at, [first, end])


def _take_back(state: CurriculumState, sample: int) -> None:
    """Have a sample played again: the ranges are without it."""
    del state["due"][str(sample)]
    out: list[list[int]] = state["out"]
    at = bisect_right(out, sample, key=itemgetter(0)) - 1
    first, end = out[at]
    out[at : at + 1] = [part for part in ([first, sample], [sample + 1, end]) if part[0] < part[1]]


class Stages(Section):
    """One stage of samples after the other: the next begins once the policy does well enough at this one. Samples of a
    stage are gone through in the order of their numbers, again and again."""

    sizes: tuple[PositiveInt, ...] = Field(min_length=1, strict=False)
    """Samples of each stage: [500, 1000] has samples 0 to 499, then 500 to 1499."""
    threshold: float
    """A stage is over at this mean reward ..."""
    window: PositiveInt = 64
    """... of so many groups of it, the last that ended. The last stage is never over."""

    def begin(self) -> CurriculumState:
        return {"stage": 0, "next": 0, "means": []}

    def next_sample(self, state: CurriculumState) -> int:
        return state["next"]

    def given(self, state: CurriculumState, sample: int) -> None:
        first, end = self._range(state)
        if first <= sample < end:  # else it is of another stage, since a record of the journal was lost
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
        """The first sample of the stage, and the first that is beyond it."""
        stage: int = state["stage"]
        first = sum(self.sizes[:stage])
        return first, first + self.sizes[stage]

"""The library's own curricula. Each is the table of its settings, too."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from statistics import fmean
from typing import Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from titan_rl.scheduling.mix.curriculum import CurriculumState
from titan_rl.settings import Section


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
        return {"pass": 0, "next": 0, "due": {}}

    def next_sample(self, state: CurriculumState) -> int:
        return self._search(state)[1]

    def given(self, state: CurriculumState, sample: int) -> None:
        number, found = self._search(state)
        if found == sample:
            state["pass"], state["next"] = number, sample + 1

    def finished(self, state: CurriculumState, sample: int, rewards: Sequence[float]) -> None:
        if not rewards:
            return
        if self.too_hard < fmean(rewards) < self.too_easy:
            state["due"].pop(str(sample), None)
        else:
            state["due"][str(sample)] = state["pass"] + 1 + self.left_out

    def _search(self, state: CurriculumState) -> tuple[int, int]:
        """(pass, sample) of the next one that is due."""
        first: int = state["next"]
        for number in count(state["pass"]):
            for sample in range(first, self.samples):
                if state["due"].get(str(sample), 0) <= number:
                    return number, sample
            first = 0
        raise AssertionError("every sample is due in some pass")


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

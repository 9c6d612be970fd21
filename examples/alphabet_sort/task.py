"""Alphabet-sort as a task: its settings, samples, environment and rubric."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Self

from pydantic import PositiveFloat, PositiveInt, model_validator

from examples.alphabet_sort.data import FIRST_NAMES, LAST_NAMES, Sample, draw_turns, name_pool
from examples.alphabet_sort.demonstrations import RIGHT, SHUFFLED, demonstrate
from examples.alphabet_sort.env import AlphabetSortEnv
from examples.alphabet_sort.rubric import alphabet_sort_rubric
from titan_rl.core.settings import Section
from titan_rl.rollout.environment.messages import MessageTokenEnv
from titan_rl.rollout.environment.types import TokenEnv
from titan_rl.rollout.renderer.types import Renderer
from titan_rl.rollout.rewards.rubric import Rubric
from titan_rl.rollout.task import Demonstration


class AlphabetSort(Section):
    """Task of sorting names by first or last name. Later turns bring more names and ask for the combined list.

    The defaults suit a model of some billion parameters.
    """

    pool_size: PositiveInt = 1000
    """Number of full names to draw from."""
    min_turns: PositiveInt = 1
    max_turns: PositiveInt = 3
    min_first_names: PositiveInt = 2
    """Fewest names that the first turn brings."""
    max_first_names: PositiveInt = 5
    min_new_names: PositiveInt = 1
    """Fewest names that a later turn brings."""
    max_new_names: PositiveInt = 5
    power: PositiveFloat = 4.0
    """The reward of a turn is its similarity, in [0, 1], to this power."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        for low, high in (
            ("min_turns", "max_turns"),
            ("min_first_names", "max_first_names"),
            ("min_new_names", "max_new_names"),
        ):
            least, most = getattr(self, low), getattr(self, high)
            if least > most:
                raise ValueError(f"{low} is {least}, above {high} {most}; lower {low} or raise {high}")
        if self.pool_size > (largest := len(FIRST_NAMES) * len(LAST_NAMES)):
            raise ValueError(f"pool_size is {self.pool_size}; there are {largest} names, use at most that")
        needed = 2 * (self.max_first_names + (self.max_turns - 1) * self.max_new_names)
        if self.pool_size < needed:
            raise ValueError(
                f"pool_size is {self.pool_size}; with these turns it must be at least {needed}, twice the names of "
                "the longest conversation: raise it, or lower max_turns, max_first_names or max_new_names"
            )
        return self

    def train_sample(self, seed: int, index: int) -> Sample:
        return self._sample(f"train/{seed}/{index}", held_out=False)

    def validation_samples(self, count: int) -> list[Sample]:
        return [self._sample(f"validation/{index}", held_out=True) for index in range(count)]

    def make_env(self, sample: Sample, renderer: Renderer) -> TokenEnv:
        return MessageTokenEnv(AlphabetSortEnv(sample), renderer)

    def rubric(self) -> Rubric:
        return alphabet_sort_rubric(self.power)

    def demonstrations(self, count: int) -> Iterator[Demonstration]:
        """Yield right demonstrations, then sloppy ones."""
        rng = random.Random("demonstrations")
        for number in range(count):
            sample = self._sample(f"demonstration/{number}", held_out=False)
            yield demonstrate(sample, rng, shuffled=0.0 if number < RIGHT * count else SHUFFLED)

    def _sample(self, key: str, *, held_out: bool) -> Sample:
        rng = random.Random(key)  # from a string, so the same in every process
        sizes = [(self.min_first_names, self.max_first_names)]
        sizes += [(self.min_new_names, self.max_new_names)] * (rng.randint(self.min_turns, self.max_turns) - 1)
        sort_by = rng.choice(("first", "last"))
        return Sample(sort_by, draw_turns(rng, name_pool(self.pool_size), sizes, held_out=held_out))

"""Figures that a task's `measure` gives for groups of held-out samples."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from titan_rl import DataError, RolloutGroup, Rubric
from titan_rl.rollout.task import measured


class Measured:
    def __init__(self, figures: Any) -> None:
        self.figures = figures

    def train_sample(self, seed: int, index: int) -> int:
        return index

    def validation_samples(self, count: int) -> Sequence[int]:
        return range(count)

    def make_env(self, sample: Any, renderer: Any) -> Any: ...

    def rubric(self) -> Rubric: ...

    def measure(self, groups: Sequence[RolloutGroup]) -> Mapping[str, float]:
        if isinstance(self.figures, Exception):
            raise self.figures
        return self.figures


def test_measure_returns_numbers_by_name() -> None:
    assert measured(Measured({"exploitability": 1}), []) == {"exploitability": 1.0}


@pytest.mark.parametrize("figures", [KeyError("card"), None, {"a": float("nan")}, {"a": "much"}, {1: 0.5}])
def test_invalid_measure_raises_data_error(figures: Any) -> None:
    with pytest.raises(DataError, match="measure of the task failed"):
        measured(Measured(figures), [])

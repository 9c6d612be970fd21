"""What a person is told of a step that has finished."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

_TOLD_ERRORS = 0.05  # share of the rollouts


class ShownStep(Protocol):
    """One finished step, as the display shows it."""

    @property
    def step(self) -> int:
        """From 1."""
        ...

    @property
    def seconds(self) -> float: ...

    @property
    def curve(self) -> tuple[str, float, str]:
        """What is looked at most: its name, its value, and a note to it, which may be empty."""
        ...

    @property
    def figures(self) -> Mapping[str, str]:
        """The rest, by name."""
        ...


@dataclass(frozen=True, slots=True)
class StepReport:
    """Of a step of reinforcement learning."""

    step: int  # from 1
    reward: float  # mean over the rollouts that it was trained on and those that were dropped
    reward_trained: float  # mean over those that the step was trained on
    tokens_per_second: float  # completion tokens
    staleness: float | None  # mean over the trained tokens, where the trainer says it
    seconds: float
    errors: float = 0.0  # share of all those rollouts that ended in an error

    @property
    def curve(self) -> tuple[str, float, str]:
        notes = [f"trained on {self.reward_trained:.3f}"] if abs(self.reward - self.reward_trained) >= 0.0005 else []
        notes += [f"{self.errors:.0%} ended in an error"] if self.errors >= _TOLD_ERRORS else []
        return "reward", self.reward, f" ({'; '.join(notes)})" if notes else ""

    @property
    def figures(self) -> Mapping[str, str]:
        staleness = {} if self.staleness is None else {"staleness": f"{self.staleness:.1f}"}
        return {"tokens/s": f"{self.tokens_per_second:6.0f}", **staleness}

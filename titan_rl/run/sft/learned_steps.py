"""What the steps of a supervised run have learned, to be learned again."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

from titan_rl.run.sft.token_source import TokenSource
from titan_rl.training.data.sample import TrainingSample
from titan_rl.training.state.checkpoint import step_of


class LearnedSteps:
    """The `TrainedSteps` of a plan.

    Args:
        plan: the numbers of the demonstrations that each step learns.
    """

    def __init__(self, tokens: TokenSource, plan: Sequence[Sequence[int]]) -> None:
        self._tokens = tokens
        self._plan = plan

    async def since(self, checkpoint: Path | None, version: int) -> AsyncGenerator[Sequence[TrainingSample]]:
        for numbers in self._plan[0 if checkpoint is None else step_of(checkpoint) : version]:
            yield self._tokens.samples(numbers)  # in tokens already, as this process has learned them

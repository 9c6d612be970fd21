"""Steps that the trainer skips, because nothing can be learned from their batch, and the limit on them."""

from __future__ import annotations

import logging
from collections.abc import Callable

from titan_rl.core.errors import TrainingError, listed
from titan_rl.training.protocol import StepResult

logger = logging.getLogger(__name__)


class SkippedSteps:
    """Counts the steps of a run that were skipped, in whole or in part, and ends it after too many.

    A skipped step makes a version as any other does, and its batch is done with: a run that goes on, or is resumed,
    trains on the next one.

    Attributes:
        count: since the run was started or resumed.

    Args:
        limit: `training.max_skipped_steps`.
        tell: shows a person which step was skipped, and why.
    """

    def __init__(self, limit: int, tell: Callable[[str], object]) -> None:
        self._limit = limit
        self._tell = tell
        self._texts: list[str] = []

    @property
    def count(self) -> int:
        return len(self._texts)

    def note(self, result: StepResult) -> dict[str, str]:
        """Count a step if any of it was skipped, and tell which.

        Returns:
            for each rollout that was not learned from, by its id, why that is.
        """
        if not result.skipped:
            return {}
        reasons: dict[str, str] = {}
        for part in result.skipped:
            reasons |= dict.fromkeys(part.rollout_ids, part.reason)
            reasons |= dict.fromkeys(part.at_fault, f"{part.reason}; this rollout's loss is not finite")
        texts = [f"{part.reason}; rollouts: {listed(part.at_fault or part.rollout_ids)}" for part in result.skipped]
        self._texts.append(f"step {result.version} is skipped: {'; '.join(texts)}")
        logger.warning(self._texts[-1])
        self._tell(f"{self._texts[-1]} ({self.count} of training.max_skipped_steps = {self._limit})")
        return reasons

    def check(self) -> None:
        """
        Raises:
            TrainingError: more steps were skipped than may be; the message names the rollouts.
        """
        if self.count > self._limit:
            raise TrainingError(
                f"{self.count} steps were skipped, and training.max_skipped_steps = {self._limit}: "
                f"{'; '.join(self._texts)}. rollouts.jsonl has these rollouts. Look for extreme rewards or logprobs in "
                "them, or lower training.lr; --resume goes on behind them, with training.max_skipped_steps counted anew"
            )

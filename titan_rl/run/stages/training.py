"""Calls of the trainer that outlive a cancelled run, and the count of skipped steps."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar, runtime_checkable

from titan_rl.core.calls.cancellation import stray_cancellation_fails
from titan_rl.core.console import Console
from titan_rl.core.errors import TrainingError, listed
from titan_rl.training.protocol import StepResult, Trainer

logger = logging.getLogger(__name__)

R = TypeVar("R")


@runtime_checkable
class Recovers(Protocol):
    """Trainer that is restarted when it dies."""

    def give_up(self) -> None:
        """End of the run: the trainer is not restarted, and calls that wait for it fail."""
        ...

    def waits_for(self) -> str:
        """Event that calls wait for; "" while they wait for none."""
        ...


class TrainerCalls:
    """Calls of the trainer, one at a time. The trainer finishes a call whose caller is cancelled, and so does this
    class: only then the version is known.

    Args:
        trainer: that is called. An attribute, too.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self._call: asyncio.Future[Any] | None = None

    @property
    def running(self) -> bool:
        return self._call is not None and not self._call.done()

    def waits_for(self) -> list[str]:
        """Description of the trainer's work, for a stalled run."""
        if isinstance(self.trainer, Recovers) and (lacks := self.trainer.waits_for()):
            return [lacks]
        return ["the trainer is at work"] * self.running

    async def finish(self, call: Coroutine[Any, Any, R]) -> R:
        """Await a call. If this is cancelled, the call continues, and `wait` waits for it."""
        self._call = asyncio.ensure_future(call)
        with stray_cancellation_fails("a call of the trainer"):
            return await asyncio.shield(self._call)

    async def wait(self) -> None:
        """Wait at the end of a run until no call is running, and log its error. A dead trainer is not waited for, since
        a new host may take long: its samples are in the journal."""
        if isinstance(self.trainer, Recovers):
            self.trainer.give_up()
        if self._call is None:
            return
        await asyncio.wait([self._call])
        if not self._call.cancelled() and (error := self._call.exception()) is not None:
            logger.warning("what the trainer was at work on failed: %r", error)


class SkippedSteps:
    """Counts the steps of a run that were skipped, in whole or in part, and ends it after too many.

    A skipped step makes a version as any other does, and its batch is done with: a run that goes on, or is resumed,
    trains on the next one.

    Attributes:
        count: since the run was started or resumed.

    Args:
        limit: `training.max_skipped_steps`.
        console: shows the user which step was skipped, and why.
    """

    def __init__(self, limit: int, console: Console) -> None:
        self._limit = limit
        self._console = console
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
        self._console.warning(f"{self._texts[-1]} ({self.count} of training.max_skipped_steps = {self._limit})")
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

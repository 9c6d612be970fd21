"""The rollouts of one group: run at once, again after a fault, and stopped when none is of use any more."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from titan_rl.errors import StrayCancellationError
from titan_rl.rollout.types import Rollout, RolloutStatus

logger = logging.getLogger(__name__)


class SiblingRollouts:
    """
    Args:
        new: the rollout of a sibling that has been run so often before, not begun.
        run: runs one to its end, in place.
        ended: called with each sibling when it has ended for good, or was stopped.
        max_retries: of all siblings together.
    """

    def __init__(
        self,
        new: Callable[[int, int], Rollout],
        run: Callable[[Rollout], Awaitable[object]],
        ended: Callable[[Rollout], None],
        *,
        group_size: int,
        max_retries: int,
    ) -> None:
        self._new = new
        self._run = run
        self._ended = ended
        self._retries_left = max_retries
        self._rollouts = [new(sibling, 0) for sibling in range(group_size)]
        self._tasks: list[asyncio.Task[None]] = []
        self._why_stopped: str | None = None

    def start(self, tasks: asyncio.TaskGroup) -> None:
        self._tasks = [tasks.create_task(self._run_sibling(sibling)) for sibling in range(len(self._rollouts))]

    def stop(self, why: str) -> None:
        """Those that still run end as ABORTED, with the turns they have."""
        self._why_stopped = why
        for task in self._tasks:
            task.cancel()

    def rollouts(self) -> Sequence[Rollout]:
        """As they ended. Called once the task group has.

        Raises:
            StrayCancellationError: one was cancelled, and nobody had stopped it.
        """
        for task, rollout in zip(self._tasks, self._rollouts, strict=True):
            if task.cancelled():
                what = f"rollout {rollout.rollout_id!r}"
                raise StrayCancellationError(f"{what} was cancelled, though nobody had asked for that")
        return self._rollouts

    async def _run_sibling(self, sibling: int) -> None:
        attempt = 0
        while True:
            rollout = self._rollouts[sibling]
            try:
                await self._run(rollout)
            except asyncio.CancelledError:
                if self._why_stopped is None:
                    raise
                rollout.status, rollout.error = RolloutStatus.ABORTED, self._why_stopped
            if not rollout.status.is_fault or self._retries_left == 0:
                break
            self._retries_left -= 1
            attempt += 1
            logger.warning("%s is run again after %s: %s", rollout.rollout_id, rollout.status, rollout.error)
            self._rollouts[sibling] = self._new(sibling, attempt)
        rollout.metrics["retries"] = float(attempt)
        self._ended(rollout)

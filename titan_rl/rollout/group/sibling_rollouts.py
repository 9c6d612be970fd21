"""The rollouts of one group: run at once, again after a fault, and stopped when none is of use any more."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from titan_rl.core.errors import StrayCancellationError
from titan_rl.rollout.types import Rollout, RolloutStatus

logger = logging.getLogger(__name__)


class SiblingRollouts:
    """
    Args:
        new: the rollout of a sibling that has been run so often before, not begun.
        run: runs one to its end, in place: it is in a list, and where its environment has several seats that becomes
            one for each.
        max_retries: of all siblings together.
    """

    def __init__(
        self,
        new: Callable[[int, int], Rollout],
        run: Callable[[list[Rollout]], Awaitable[object]],
        *,
        group_size: int,
        max_retries: int,
    ) -> None:
        self._new = new
        self._run = run
        self._retries_left = max_retries
        self._siblings = [[new(sibling, 0)] for sibling in range(group_size)]
        self._tasks: list[asyncio.Task[None]] = []
        self._why_stopped: str | None = None

    def start(self, tasks: asyncio.TaskGroup, ended: Callable[[Rollout], None]) -> None:
        """
        Args:
            ended: called with each rollout when its sibling has ended for good, or was stopped. It is not kept, so that
                a group holds no cycle of references, which would keep its tokens until the garbage collector finds it.
        """
        self._tasks = [tasks.create_task(self._run_sibling(sibling, ended)) for sibling in range(len(self._siblings))]

    def stop(self, why: str) -> None:
        """Those that still run end as ABORTED, with the turns they have."""
        self._why_stopped = why
        for task in self._tasks:
            task.cancel()

    def rollouts(self) -> list[Rollout]:
        """As they ended, siblings one after the other. Called once the task group has.

        Raises:
            StrayCancellationError: one was cancelled, and nobody had stopped it.
        """
        for task, rollouts in zip(self._tasks, self._siblings, strict=True):
            if task.cancelled():
                what = f"rollout {rollouts[0].rollout_id!r}"
                raise StrayCancellationError(f"{what} was cancelled, though nobody had asked for that")
        return [rollout for rollouts in self._siblings for rollout in rollouts]

    async def _run_sibling(self, sibling: int, ended: Callable[[Rollout], None]) -> None:
        attempt = 0
        while True:
            rollouts = self._siblings[sibling]
            try:
                await self._run(rollouts)
            except asyncio.CancelledError:
                if self._why_stopped is None:
                    raise
                for rollout in rollouts:
                    rollout.status, rollout.error = RolloutStatus.ABORTED, self._why_stopped
            failed = next((rollout for rollout in rollouts if rollout.status.is_fault), None)
            if failed is None or self._retries_left == 0:
                break
            self._retries_left -= 1
            attempt += 1
            logger.warning("%s is run again after %s: %s", failed.rollout_id, failed.status, failed.error)
            self._siblings[sibling] = [self._new(sibling, attempt)]
        for rollout in rollouts:
            rollout.metrics["retries"] = float(attempt)
            ended(rollout)

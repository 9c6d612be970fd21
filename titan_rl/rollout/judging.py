"""Judging the siblings of one group as they end."""

from __future__ import annotations

import asyncio

from titan_rl.errors import RewardError
from titan_rl.rollout.recess import Recess
from titan_rl.rollout.types import Rollout, RolloutGroup, RolloutStatus
from titan_rl.rubric import Rubric


class Judging:
    """Begins with each sibling when it ends, and stops with the first that was aborted: such a group has no reward.

    Args:
        tasks: the group's own; judges end with it.
        recess: where judges wait while generation is paused.
    """

    def __init__(self, rubric: Rubric, tasks: asyncio.TaskGroup, recess: Recess) -> None:
        self._rubric = rubric
        self._recess = recess
        self._tasks = tasks
        self._running: list[asyncio.Task[None]] = []
        self._stopped = False
        self._failure: RewardError | None = None

    def ended(self, rollout: Rollout) -> None:
        if rollout.status is RolloutStatus.ABORTED:
            self._stopped = True
            for judge in self._running:
                judge.cancel()
        elif not self._stopped:
            self._running.append(self._tasks.create_task(self._begin(rollout), name=f"judge-{rollout.rollout_id}"))

    async def finish(self, group: RolloutGroup) -> None:
        """What needs all siblings. Called once the task group has ended.

        Raises:
            RewardError: a reward function failed, now or before.
        """
        if self._failure is not None:
            raise self._failure
        await self._recess.judge(lambda: self._rubric.score(group))

    async def _begin(self, rollout: Rollout) -> None:
        try:
            await self._recess.judge(lambda: self._rubric.begin(rollout))
        except RewardError as error:
            self._failure = self._failure or error

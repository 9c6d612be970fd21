"""Judging of the siblings of a group as they end, and its suspension while generation is paused."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from titan_rl.core.calls.user_code import Failure
from titan_rl.core.errors import RewardError
from titan_rl.rollout.rewards.rubric import Rubric
from titan_rl.rollout.types import Rollout, RolloutGroup, RolloutStatus

logger = logging.getLogger(__name__)


class JudgingPause:
    """Pause of judging. Judges in progress may finish within a grace period; then they are cancelled, and restart
    after the pause. Judges that start during the pause wait for its end.

    Args:
        grace_s: length of the grace period.
        limit_s: longest time that a judge waits for the end; then it continues regardless.
    """

    def __init__(self, grace_s: float, limit_s: float) -> None:
        self._grace_s = grace_s
        self._limit_s = limit_s
        self._over = asyncio.Event()
        self._over.set()
        self._grace: asyncio.TimerHandle | None = None
        self._at_work: set[asyncio.Timeout] = set()

    def begin(self) -> None:
        """Begin the grace period; no effect if a pause has begun already."""
        if self._over.is_set():
            self._over.clear()
            self._grace = asyncio.get_running_loop().call_later(self._grace_s, self._cancel_all)

    def end(self) -> None:
        if self._grace is not None:
            self._grace.cancel()
        self._over.set()

    async def judge(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Result of `work()`, which is called again each time a pause has cancelled it. Cancelling the caller ends
        it."""
        while True:
            if not self._over.is_set():
                await self._wait()
            scope = asyncio.timeout(None)
            try:
                async with scope:
                    self._at_work.add(scope)
                    try:
                        return await work()
                    finally:
                        self._at_work.discard(scope)
            except TimeoutError:
                if not scope.expired():
                    raise

    def _cancel_all(self) -> None:
        for scope in self._at_work:
            scope.reschedule(asyncio.get_running_loop().time())
        if self._at_work:
            count = len(self._at_work)
            logger.warning("cancelled %d rewards %g s into a pause; they restart after it", count, self._grace_s)

    async def _wait(self) -> None:
        try:
            async with asyncio.timeout(self._limit_s):
                await self._over.wait()
        except TimeoutError:
            logger.warning("the pause has lasted %g s; judging continues regardless", self._limit_s)


T = TypeVar("T")


class Judging:
    """Judging of one group: starts with each sibling when it ends. A group has no rewards if a sibling was aborted or a
    reward fails for good.

    Args:
        tasks: task group of the rollouts; judges end with it.
        pause: makes judges wait while generation is paused.
        give_up: called once with the reason when a reward has failed for good.

    Attributes:
        error: the failure, if any.
    """

    def __init__(
        self, rubric: Rubric, tasks: asyncio.TaskGroup, pause: JudgingPause, give_up: Callable[[str], None]
    ) -> None:
        self.error: RewardError | None = None
        self._rubric = rubric
        self._judging_pause = pause
        self._tasks = tasks
        self._give_up = give_up
        self._running: list[asyncio.Task[None]] = []
        self._begun: dict[str, dict[str, float]] = {}  # values judged early, by rollout id
        self._stopped = False

    def ended(self, rollout: Rollout) -> None:
        if rollout.status is RolloutStatus.ABORTED:
            self._stop()
        elif not self._stopped:
            self._running.append(self._tasks.create_task(self._begin(rollout), name=f"judge-{rollout.rollout_id}"))

    async def finish(self, group: RolloutGroup) -> None:
        """Score the group. Call once the task group has ended.

        Raises:
            RewardError: a reward function failed, now or before, and its policy is to end the run. If the policy is to
                drop the group, `group.failure` is set instead.
        """
        if self.error is None and not group.is_aborted:
            try:
                # In a separate task: a judge that cancels the current task must not cancel the group.
                await asyncio.ensure_future(self._timed(lambda: self._rubric.score(group, self._begun), group.rollouts))
            except RewardError as error:
                self.error = error
        if self.error is None:
            return
        if self.error.ends_run:
            raise self.error
        failure = Failure.of(self.error, f"RewardError: {self.error.text}")
        group.failure = replace(failure, where=self.error.where)
        for rollout in group.rollouts:
            if rollout.error is None:
                rollout.error, rollout.failure = group.failure.error, group.failure
        logger.warning("group %s is dropped: %s", group.group_id, self.error)

    async def _begin(self, rollout: Rollout) -> None:
        try:
            self._begun[rollout.rollout_id] = await self._timed(lambda: self._rubric.begin(rollout), [rollout])
        except RewardError as error:
            if self.error is None:
                self.error = error
                self._stop()
                self._give_up(f"stopped because a sibling could not be judged: {error}")

    async def _timed(self, judge: Callable[[], Coroutine[Any, Any, T]], rollouts: Sequence[Rollout]) -> T:
        """Result of `judge`; its time, pauses included, is divided among the rollouts' `reward_seconds`."""
        clock = asyncio.get_running_loop().time
        began = clock()
        judged = await self._judging_pause.judge(judge)
        for rollout in rollouts:
            before = rollout.metrics.get("reward_seconds", 0.0)
            rollout.metrics["reward_seconds"] = before + (clock() - began) / len(rollouts)
        return judged

    def _stop(self) -> None:
        self._stopped = True
        for judge in self._running:
            judge.cancel()

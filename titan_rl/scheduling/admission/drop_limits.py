"""When a run that trains on nothing ends: too much was dropped, or lost to errors."""

from __future__ import annotations

import asyncio
from collections import Counter

from titan_rl.core.errors import TrainingError
from titan_rl.rollout.group.failures import ErrorCounts
from titan_rl.rollout.types import RolloutGroup, RolloutStatus
from titan_rl.scheduling.filters import EQUAL_REWARDS_ADVICE, LOST


class DropLimits:
    """Counts what was dropped since the last batch, and the groups that were lost to errors in a row.

    A group that was lost to errors counts for the second limit alone, whose message names the error.

    Args:
        max_refills: so often may all `groups_per_step` groups of a batch be dropped.
        max_failed_groups: so many lost in a row are too many.
    """

    def __init__(self, groups_per_step: int, max_refills: int, max_failed_groups: int) -> None:
        self._groups_per_step = groups_per_step
        self._max_refills = max_refills
        self._max_failed_groups = max_failed_groups
        self._drops: Counter[str] = Counter()
        self._tasks: Counter[str] = Counter()  # of these groups
        self._num_unparsed = 0  # rollouts without a reward in these groups, for their answers could not be parsed
        self._num_lost = 0
        self._errors = ErrorCounts()  # of those groups
        self._within = asyncio.Event()  # neither limit is reached
        self._within.set()

    def dropped(self, reason: str, group: RolloutGroup | None, task: str | None = None) -> None:
        """
        Args:
            group: None where it had not finished.
            task: None where there is one for all.
        """
        self._drops[reason] += 1
        if task is not None:
            self._tasks[task] += 1
        if group is not None and reason == "too_few_siblings":
            self._num_unparsed += sum(
                rollout.status is RolloutStatus.ERROR_PARSE and rollout.reward is None for rollout in group.rollouts
            )
        self._update()

    def finished(self, group: RolloutGroup, reason: str | None) -> None:
        """
        Args:
            reason: why the group is not trained on; None if it is.
        """
        if reason in LOST:
            self._num_lost += 1
            self._errors.add_group(group)
        else:
            self._num_lost, self._errors = 0, ErrorCounts()
        self._update()

    def batch_found(self) -> None:
        self._drops.clear()
        self._tasks.clear()
        self._num_unparsed = 0
        self._update()

    async def wait_within(self) -> None:
        """Return while no limit is reached. Else nothing more is to be played until somebody asks for a batch, who is
        told or finds one."""
        await self._within.wait()

    def check(self) -> None:
        """Called while there is no batch.

        Raises:
            TrainingError: it has run out.
        """
        if self._too_many_lost:
            text, count = self._errors.most_common()[0]
            raise TrainingError(
                f"{self._num_lost} groups in a row were lost to errors, {count} of their {self._errors.num_rollouts} "
                f"rollouts to {text}; rollouts.jsonl has more, and logs/controller.log the tracebacks; "
                f"scheduling.max_failed_groups = {self._max_failed_groups}"
            )
        if self._too_many_drops:
            reasons = ", ".join(f"{reason} ({count})" for reason, count in self._drops.most_common())
            tasks = ", ".join(f"{task} ({count})" for task, count in self._tasks.most_common())
            of_tasks = f", of the tasks {tasks}" if tasks else ""
            raise TrainingError(
                f"{self._drops.total()} groups in a row could not be trained on{of_tasks}: {reasons}; "
                f"{self._drop_advice()}"
            )

    def _drop_advice(self) -> str:
        most = next(reason for reason, _ in self._drops.most_common() if reason not in LOST)
        unparsed = (
            f"{self._num_unparsed} of their rollouts have an answer that could not be parsed, and no reward; "
            "give the Rubric an error_reward, the least that a wrong answer earns, to train on them"
        )
        if self._num_unparsed and most == "too_few_siblings":
            return unparsed  # more groups would be no better
        equal = f"try: {EQUAL_REWARDS_ADVICE}; or " if most == "zero_variance" else ""
        unparsed = f"{unparsed}; or " if self._num_unparsed else ""
        return f"{equal}{unparsed}raise scheduling.max_refills = {self._max_refills} if this is expected"

    @property
    def _too_many_drops(self) -> bool:
        num_drops = sum(count for reason, count in self._drops.items() if reason not in LOST)
        return num_drops > self._max_refills * self._groups_per_step

    @property
    def _too_many_lost(self) -> bool:
        return self._num_lost >= self._max_failed_groups

    def _update(self) -> None:
        if self._too_many_drops or self._too_many_lost:
            self._within.clear()
        else:
            self._within.set()

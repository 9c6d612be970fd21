"""What a run notes of its groups as the scheduler settles them: in the mix of tasks, the journal, the transcripts."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from titan_rl.rollout.types import RolloutGroup
from titan_rl.run.journal.run_journal import RunJournal
from titan_rl.run.observability.rollout_log import RolloutLog
from titan_rl.scheduling.mix.task_mix import TaskMix


@dataclass(frozen=True, slots=True)
class DroppedGroups:
    """Groups that made room for those of a batch."""

    finished: list[RolloutGroup] = field(default_factory=list[RolloutGroup])
    reasons: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])  # by task and reason


class GroupRecords:
    """The `SchedulerObserver` of a run.

    Args:
        tell: shows the user a message.
    """

    def __init__(self, mix: TaskMix, journal: RunJournal, transcripts: RolloutLog, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._mix = mix
        self._journal = journal
        self._transcripts = transcripts
        self._dropped: defaultdict[int, DroppedGroups] = defaultdict(DroppedGroups)  # by the step they made room for

    def finished(self, index: int, group: RolloutGroup) -> None:
        self._mix.finished(index, rewards_of(group))
        self._journal.finished(self._mix.assignment(index), group)

    def dropped(self, step: int, index: int, reason: str, group: RolloutGroup | None) -> None:
        if (task := self._mix.task_of(index)) is not None:
            self._dropped[step].reasons[task, reason] += 1
        if group is not None:
            self._dropped[step].finished.append(group)
            self._transcripts.dropped(group, reason, step)
            self._mix.finished(index, rewards_of(group))
        self._mix.dropped(index)
        self._journal.dropped(index, reason)

    def discarded(self, index: int, group: RolloutGroup) -> None:
        self._journal.discarded(index)
        self._tell(
            f"group {group.group_id} is generated again: it has tokens of version {min(group.versions)}, which are too "
            "old to be trained on where the run goes on"
        )

    def batch(self, version: int, indices: Sequence[int]) -> None:
        self._journal.batch(version, indices)

    def take_dropped(self, step: int) -> DroppedGroups:
        """What was dropped before the batch of the step was found; once."""
        return self._dropped.pop(step, DroppedGroups())


def rewards_of(group: RolloutGroup) -> list[float]:
    """Of the rollouts that have one and did not end in a fault of others."""
    judged = [rollout.reward for rollout in group.rollouts if not rollout.status.is_fault]
    return [float(reward) for reward in judged if reward is not None and math.isfinite(reward)]

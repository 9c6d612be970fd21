"""What a run notes of its groups as the scheduler settles them: the journal, the transcripts, what was dropped."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from titan_rl.rollout.types import RolloutGroup
from titan_rl.run.journal.run_journal import RunJournal
from titan_rl.run.observability.rollout_log import RolloutLog


class GroupRecords:
    """The `SchedulerObserver` of a run."""

    def __init__(self, journal: RunJournal, transcripts: RolloutLog) -> None:
        self._journal = journal
        self._transcripts = transcripts
        self._dropped: defaultdict[int, list[RolloutGroup]] = defaultdict(list)  # by the step they made room for

    def finished(self, index: int, group: RolloutGroup) -> None:
        self._journal.finished(index, group)

    def dropped(self, step: int, index: int, reason: str, group: RolloutGroup | None) -> None:
        if group is not None:
            self._dropped[step].append(group)
            self._transcripts.dropped(group, reason, step)
        self._journal.dropped(index, reason)

    def batch(self, version: int, indices: Sequence[int]) -> None:
        self._journal.batch(version, indices)

    def take_dropped(self, step: int) -> list[RolloutGroup]:
        """The groups that finished and were dropped before the batch of the step was found; once."""
        return self._dropped.pop(step, [])

"""What a run notes of its groups as the scheduler settles them: the journal, the transcripts, what was dropped."""

from __future__ import annotations

from collections.abc import Sequence

from titan_rl.rollout.types import RolloutGroup
from titan_rl.run.journal.run_journal import RunJournal
from titan_rl.run.observability.rollout_log import RolloutLog


class GroupRecords:
    """The `SchedulerObserver` of a run.

    Args:
        version: that the next batch is trained from.
    """

    def __init__(self, journal: RunJournal, log: RolloutLog, version: int) -> None:
        self._journal = journal
        self._log = log
        self._next_version = version
        self._dropped: dict[int, list[RolloutGroup]] = {version: []}  # by the version that the next batch starts from

    def finished(self, index: int, group: RolloutGroup) -> None:
        self._journal.finished(index, group)

    def dropped(self, index: int, reason: str, group: RolloutGroup | None) -> None:
        if group is not None:
            self._dropped[self._next_version].append(group)
            self._log.dropped(group, reason, self._next_version + 1)
        self._journal.dropped(index, reason, group)

    def batch(self, version: int, indices: Sequence[int]) -> None:
        self._next_version = version + 1
        self._dropped[self._next_version] = []
        self._journal.batch(version, indices)

    def take_dropped(self, version: int) -> list[RolloutGroup]:
        """The groups that finished and were dropped before the batch trained from `version` was found; once."""
        return self._dropped.pop(version, [])

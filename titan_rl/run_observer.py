"""What a run remembers of its groups as the scheduler settles them: the journal, the transcripts, the rewards."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from titan_rl.durability.run_journal import RunJournal
from titan_rl.observability.rollout_log import RolloutLog
from titan_rl.rollout.types import RolloutGroup


class RunObserver:
    """The `SchedulerObserver` of a run.

    A curve of the groups that are trained on says what the filters leave. What the policy earns is the mean over all
    groups that finished, so both are told.

    Args:
        version: that the next batch is trained from.
    """

    def __init__(self, journal: RunJournal, log: RolloutLog, version: int) -> None:
        self._journal = journal
        self._log = log
        self._next_version = version
        self._counted: set[int] = set()  # finished, and neither in a batch nor dropped
        self._finished: list[RolloutGroup] = []  # since the last batch
        self._figures: dict[int, dict[str, float]] = {}  # by the version that a batch is trained from

    def finished(self, index: int, group: RolloutGroup) -> None:
        self._counted.add(index)
        self._finished.append(group)
        self._journal.finished(index, group)

    def dropped(self, index: int, reason: str, group: RolloutGroup | None) -> None:
        if group is not None:
            if index not in self._counted:
                self._finished.append(group)
            self._log.dropped(group, reason, self._next_version + 1)
        self._counted.discard(index)
        self._journal.dropped(index, reason, group)

    def batch(self, version: int, indices: Sequence[int]) -> None:
        self._counted.difference_update(indices)
        self._figures[version] = finished_figures(self._finished)
        self._finished = []
        self._next_version = version + 1
        self._journal.batch(version, indices)

    def take_figures(self, version: int) -> dict[str, float]:
        """Of the groups that finished between the batch trained from `version` and the one before; once."""
        return self._figures.pop(version, {})


def finished_figures(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """Of groups as they finished, before any is left out.

    Returns:
        rollout/finished_groups; rollout/finished_reward_mean, of all rollouts with a reward, absent where there is
        none; rollout/finished_errors, rollouts that ended in an error.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    figures = {
        "rollout/finished_groups": float(len(groups)),
        "rollout/finished_errors": float(sum(rollout.status.is_error for rollout in rollouts)),
    }
    return figures | ({"rollout/finished_reward_mean": fmean(rewards)} if rewards else {})

"""When a run that trains on nothing ends: too much was dropped, or lost to errors."""

from __future__ import annotations

from collections import Counter

from titan_rl.config.sections import SchedulingConfig
from titan_rl.errors import TrainingError


class Patience:
    """Counts what was dropped since the last batch, and the groups that were lost to errors in a row."""

    def __init__(self, settings: SchedulingConfig) -> None:
        self._settings = settings
        self._drops: Counter[str] = Counter()
        self._errors: list[str] = []

    def dropped(self, reason: str) -> None:
        self._drops[reason] += 1

    def lost(self, error: str) -> None:
        """A group was lost to this error."""
        self._errors.append(error)

    def played(self) -> None:
        """A group was not lost to errors, whether or not it is trained on."""
        self._errors.clear()

    def batch_found(self) -> None:
        self._drops.clear()

    def check(self) -> None:
        """Called while there is no batch.

        Raises:
            TrainingError: it has run out.
        """
        settings = self._settings
        if self._drops.total() > settings.max_refills * settings.groups_per_step:
            reasons = ", ".join(f"{reason} ({count})" for reason, count in self._drops.most_common())
            raise TrainingError(
                f"{self._drops.total()} groups in a row could not be trained on: {reasons}; "
                f"raise scheduling.max_refills = {settings.max_refills} if this is expected"
            )
        if len(self._errors) >= settings.max_failed_groups:
            raise TrainingError(
                f"{len(self._errors)} groups in a row were lost to errors, the first to {self._errors[0]}; "
                f"rollouts.jsonl has them all; scheduling.max_failed_groups = {settings.max_failed_groups}"
            )

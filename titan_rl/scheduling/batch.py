"""The groups of one optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from titan_rl.rollout.types import RolloutGroup


@dataclass(frozen=True, slots=True)
class GroupBatch:
    """Groups that hold their slots until `release`."""

    groups: list[RolloutGroup]  # [groups_per_step], the oldest first
    version: int  # that the step on them starts from
    metrics: Mapping[str, float]  # see Ledger.close_batch
    on_release: Callable[[], None]

    def release(self) -> None:
        """Give the slots back: call once, after the generators have pulled the version trained on these groups."""
        self.on_release()

"""The groups of one optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from titan_rl.core.errors import TrainingError
from titan_rl.rollout.types import RolloutGroup


@dataclass(frozen=True, slots=True)
class GroupBatch:
    """Groups that hold their slots until `release`."""

    groups: list[RolloutGroup]  # [groups_per_step], the oldest first; the last batch may have fewer
    version: int  # that the step on them starts from
    metrics: Mapping[str, float]  # see Ledger.close_batch
    on_release: Callable[[], None]

    @property
    def step(self) -> int:
        """The number of the step on it, which is also the version that it makes."""
        return step_from(self.version)

    @property
    def num_tokens(self) -> int:
        """Completion tokens."""
        return sum(rollout.num_completion_tokens for group in self.groups for rollout in group.rollouts)

    def trained(self, version: int) -> None:
        """The trainer says which version the step on it has made.

        Raises:
            TrainingError: it is another than that of this step.
        """
        if version != self.step:
            raise TrainingError(
                f"the step from version {self.version} gave version {version}: the trainer and the data are out of step"
            )

    def release(self) -> None:
        """Give the slots back: call once, after the generators have pulled the version trained on these groups.

        Raises:
            RuntimeError: the batch of an earlier step has not been released.
        """
        self.on_release()


def step_from(version: int) -> int:
    """The number of the step that starts from a version. A step makes the version of its number: the trainer assigns
    them so, and what it says is held to this by `GroupBatch.trained`."""
    return version + 1


def check_age(groups: Sequence[RolloutGroup], version: int, bound: int, max_staleness: int) -> None:
    """No token of a batch is more than `bound` versions old when the step from `version` is trained on it.

    Args:
        max_staleness: what the bound follows from, for the message.

    Raises:
        TrainingError: one is.
    """
    oldest = min((v for group in groups for v in group.versions), default=version)
    if version - oldest > bound:
        raise TrainingError(
            f"a token of version {oldest} reached the step from version {version}, but with "
            f"scheduling.max_staleness = {max_staleness} tokens are at most {bound} versions old"
        )

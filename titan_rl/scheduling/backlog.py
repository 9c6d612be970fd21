"""Where an earlier run of the same data stood, so that a scheduler goes on from there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from titan_rl.core.errors import ConfigError
from titan_rl.rollout.types import RolloutGroup


@dataclass(frozen=True, slots=True)
class Backlog:
    """The groups before `next_index` that are neither trained nor dropped, and what is known of them.

    Example: a run was lost when 5 and 7 had finished, 6 had not, and a step on 5 was not yet in a checkpoint:

        Backlog(next_index=8, unsettled=[5, 6, 7], finished={5: group_5, 7: group_7}, batches=[[5]])

    Raises:
        ValueError: an unsettled group is named twice, or is not before `next_index`.
    """

    next_index: int = 0
    unsettled: Sequence[int] = ()
    finished: Mapping[int, RolloutGroup] = field(default_factory=dict[int, RolloutGroup])
    batches: Sequence[Sequence[int]] = ()  # handed out since, to be handed out again just so

    def __post_init__(self) -> None:
        if len(set(self.unsettled)) < len(self.unsettled):
            raise ValueError(f"Backlog.unsettled is {list(self.unsettled)}; each group may be there once")
        if beyond := [index for index in self.unsettled if not 0 <= index < self.next_index]:
            raise ValueError(
                f"Backlog.unsettled has {beyond}; it must be of groups before next_index = {self.next_index}"
            )

    def check_admission(self, num_slots: int, budget: int) -> None:
        """Check that every batch can be handed out again. Its groups are admitted first, so it need only fit.

        Args:
            num_slots: groups that are admitted and not yet trained on, at most.
            budget: groups that are still to be trained on.

        Raises:
            ConfigError: one does not fit, because the settings are others than those of the earlier run.
        """
        left = budget
        for batch in self.batches:
            if left <= 0:
                return
            if len(batch) > (room := min(num_slots, left)):
                raise ConfigError(
                    f"the batch of groups {list(batch)} cannot be trained again as it was: only {room} of its groups "
                    f"would start in the {num_slots} slots that scheduling.groups_per_step, max_staleness and "
                    f"oversample come to, with {left} groups more to train; resume with the settings that the run had"
                )
            left -= len(batch)

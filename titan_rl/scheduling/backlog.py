"""Where an earlier run of the same data stood, so that a scheduler goes on from there."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from titan_rl.errors import ConfigError
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
        """Every batch can be handed out again: its groups are admitted by the time that those before it are pulled.

        Args:
            num_slots: groups that are admitted and not yet trained on, at most.
            budget: groups that are still to be trained on.

        Raises:
            ConfigError: they would not be, because the settings are others than those of the earlier run.
        """
        queue, admitted, left = deque(list(self.unsettled)[:budget]), set[int](), budget
        for batch in self.batches:
            if left <= 0:
                return
            while queue and len(admitted) < num_slots:
                admitted.add(queue.popleft())
            if missing := set(batch) - admitted:
                raise ConfigError(
                    f"the batch of groups {list(batch)} cannot be trained again as it was: group {min(missing)} would "
                    f"never start in the {num_slots} slots that scheduling.groups_per_step, max_staleness and "
                    f"oversample come to, with {budget} groups more to train; resume with the settings that the run had"
                )
            admitted -= set(batch)
            left -= len(batch)

"""What became of time, groups and tokens: the scheduler's metrics."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from statistics import fmean

from titan_rl.rollout.types import RolloutGroup
from titan_rl.scheduling.group_state import GroupState


class Ledger:
    """Adds up between two batches how long slots spent in each state, and over the run what was accepted.

    Args:
        clock: seconds, from any start.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._states: Counter[GroupState] = Counter()
        self._seconds: defaultdict[GroupState, float] = defaultdict(float)
        self._since = clock()
        self._dropped: Counter[str] = Counter()
        self._wasted_tokens = 0
        self._generated = _Mean()
        self._accepted = _Mean()

    def move(self, before: GroupState | None, after: GroupState | None) -> None:
        """A group changes its state; None is before its admission and after it has given its slot back."""
        self._advance()
        if before is not None:
            self._states[before] -= 1
        if after is not None:
            self._states[after] += 1

    @property
    def states(self) -> Counter[GroupState]:
        """Groups in each state, as they are now."""
        return +self._states

    def finished(self, group: RolloutGroup) -> None:
        self._generated.add(lengths(group))

    def dropped(self, reason: str, group: RolloutGroup | None) -> None:
        """`group` is None where it never finished; its tokens are not known then."""
        self._dropped[reason] += 1
        if group is not None:
            self.wasted(group)

    def wasted(self, group: RolloutGroup) -> None:
        """It finished, and is not trained on."""
        self._wasted_tokens += sum(lengths(group))

    def close_batch(self, groups: Sequence[RolloutGroup], version: int) -> dict[str, float]:
        """The metrics of one batch, and a new page.

        Returns:
            slot_s/<state>: seconds that slots spent in a state, added up over the slots.
            age/<n>: groups whose oldest token is n versions old; age_mean.
            dropped/<reason>: groups. wasted_tokens: completion tokens of dropped groups.
            accepted_tokens_mean, generated_tokens_mean: completion tokens of a rollout, of those trained on and of all
            that finished, over the run. If the first is less, the schedule prefers short answers.
        """
        self._advance()
        for group in groups:
            self._accepted.add(lengths(group))
        ages = [version - min(group.versions, default=version) for group in groups]
        metrics = {f"slot_s/{state}": self._seconds[state] for state in GroupState}
        metrics |= {f"age/{age}": float(count) for age, count in sorted(Counter(ages).items())}
        metrics |= {f"dropped/{reason}": float(count) for reason, count in self._dropped.items()}
        metrics |= {
            "age_mean": fmean(ages),
            "wasted_tokens": float(self._wasted_tokens),
            "accepted_tokens_mean": self._accepted.value,
            "generated_tokens_mean": self._generated.value,
        }
        self._seconds.clear()
        self._dropped.clear()
        self._wasted_tokens = 0
        return metrics

    def _advance(self) -> None:
        now = self._clock()
        elapsed, self._since = now - self._since, now
        for state, count in self._states.items():
            self._seconds[state] += elapsed * count


def lengths(group: RolloutGroup) -> list[int]:
    """Completion tokens of each rollout."""
    return [rollout.num_completion_tokens for rollout in group.rollouts]


class _Mean:
    def __init__(self) -> None:
        self._sum = self._count = 0

    def add(self, values: Sequence[int]) -> None:
        self._sum += sum(values)
        self._count += len(values)

    @property
    def value(self) -> float:
        return self._sum / self._count if self._count else 0.0

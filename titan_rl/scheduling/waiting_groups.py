"""The groups that have been admitted and are neither in a batch nor dropped."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from titan_rl.scheduling.group_state import GroupState
from titan_rl.scheduling.lease import Lease


class WaitingGroups:
    """The leases of groups that wait for a batch, running or finished, by their position in the data.

    Args:
        window: see `choose`.
        batches_again: what the first batches consist of, whatever is ready before.
    """

    def __init__(self, window: int, batches_again: Sequence[Sequence[int]] = ()) -> None:
        self._leases: dict[int, Lease] = {}  # ascending
        self._window = window
        self._batches_again = deque(batches_again)

    def __iter__(self) -> Iterator[Lease]:
        """The oldest first. They may be removed meanwhile."""
        return iter(list(self._leases.values()))

    @property
    def has_batches_again(self) -> bool:
        """What is in the next batch is settled."""
        return bool(self._batches_again)

    def add(self, lease: Lease) -> None:
        self._leases[lease.index] = lease

    def remove(self, lease: Lease) -> None:
        del self._leases[lease.index]

    def settle_all(self) -> None:
        for lease in self._leases.values():
            lease.settle()
        self._leases.clear()

    def next_batch(self, size: int) -> list[int]:
        """The groups of the next batch; none while one of them has not finished."""
        if self._batches_again:
            batch = list(self._batches_again[0])
            return batch if all(index in self._leases and _is_done(self._leases[index]) for index in batch) else []
        batch = self._choose(_is_done, size)
        return batch if len(batch) == size else []

    def take_batch(self, indices: Sequence[int]) -> list[Lease]:
        """Remove what `next_batch` gave."""
        if self._batches_again:
            self._batches_again.popleft()
        return [self._leases.pop(index) for index in indices]

    def stale(self, oldest_version: int) -> list[Lease]:
        """Finished groups all of whose tokens are of versions before this one."""
        finished = [(lease, lease.group.versions) for lease in self if lease.group is not None]
        return [lease for lease, versions in finished if versions and max(versions) < oldest_version]

    def choose_not_suspended(self, size: int) -> list[int]:
        """Up to `size` groups that could be trained on next without any that is suspended."""
        return self._choose(lambda lease: lease.state is not GroupState.SUSPENDED, size)

    def _choose(self, is_ready: Callable[[Lease], bool], size: int) -> list[int]:
        return choose(self._leases, lambda index: is_ready(self._leases[index]), size=size, window=self._window)


def _is_done(lease: Lease) -> bool:
    return lease.state is GroupState.DONE


def choose(waiting: Iterable[int], is_ready: Callable[[int], bool], *, size: int, window: int) -> list[int]:
    """Up to `size` groups that are ready, the oldest first, overtaking by fewer than `window` places.

    Groups go by their position in the data. Over all batches together, a group is overtaken by at most `window - 1`
    others: only those less than `window` positions behind the oldest that waits may go before it.

    Args:
        waiting: positions of the groups admitted and neither trained nor dropped, in ascending order.

    Example: group 4 is not ready; with a window of 3 only 5 and 6 may overtake it.

        choose([4, 5, 6, 7], lambda index: index > 4, size=3, window=3)   # [5, 6]
    """
    chosen: list[int] = []
    oldest: int | None = None  # of those that stay
    for index in waiting:
        if len(chosen) == size or (oldest is not None and index - oldest >= window):
            break
        if is_ready(index):
            chosen.append(index)
        elif oldest is None:
            oldest = index
    return chosen

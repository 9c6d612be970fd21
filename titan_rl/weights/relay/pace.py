"""Whether a host sends so slowly that the trainer itself would be much faster."""

from __future__ import annotations

import time

TRIAL_S = 1.0  # from one look to the next, for who reads from a host that reads from the trainer
MUCH_FASTER = 3.0
TELLING_BYTES = 1 << 18


class SlowError(Exception):
    """The sender is slow, or it is not known what fast is: one chunk from the trainer shows it."""


class Pace:
    """What the trainer sends to this host, in bytes a second, as far as it is known."""

    def __init__(self) -> None:
        self.of_trainer: float | None = None

    def compare(self, bytes_per_s: float, trial_bytes: int, trial_s: float) -> bool:
        """Whether the trainer, which sent so many bytes in that time, is much faster. A small delta says little of a
        link, and is not remembered."""
        if trial_bytes >= TELLING_BYTES:
            self.of_trainer = trial_bytes / trial_s
        return bytes_per_s * MUCH_FASTER < trial_bytes / trial_s

    def is_slow(self, bytes_per_s: float) -> bool:
        return self.of_trainer is None or bytes_per_s * MUCH_FASTER < self.of_trainer


class PaceWatch:
    """Looks at what comes from one sender, now and then.

    Args:
        hops: of the sender from the trainer. Who is nearer to the trainer looks earlier, since its sender may be what
            makes the others slow.
    """

    def __init__(self, pace: Pace, hops: int) -> None:
        self._pace = pace
        self._every_s = hops * TRIAL_S
        self._begin()

    def came(self, num_bytes: int) -> None:
        """
        Raises:
            SlowError: it is time to compare the sender with the trainer.
        """
        self._bytes += num_bytes
        if time.monotonic() - self._began < self._every_s:
            return
        if self._pace.is_slow(self.bytes_per_s):
            raise SlowError
        self._begin()

    @property
    def bytes_per_s(self) -> float:
        return self._bytes / max(time.monotonic() - self._began, 1e-6)

    def _begin(self) -> None:
        self._began, self._bytes = time.monotonic(), 0

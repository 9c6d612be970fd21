"""Clears up what the processes leave that a worker has started."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable

from titan_rl.cluster.liveness.local_processes import children_of, unreaped_children_of

LOOK_S = 0.5
SETTLE_S = 10.0
"""For so long after the end of a process what it had may still be held by one that it has started."""
REAP_S = 2.0
"""Monarch asks for the ends of its children at once, if at all."""


class Aftermath:
    """Of the processes that this one starts, and that those start, however they end: by a signal, by the kernel, or
    because a run's controller is no more, which then can clear up nothing itself.

    Args:
        clean: removes what belongs to nobody any more. Called for some time after each end.
        clock: in seconds.
    """

    def __init__(self, clean: Callable[[], object], clock: Callable[[], float] = time.monotonic) -> None:
        self._clean = clean
        self._clock = clock
        self._looked_at = -LOOK_S
        self._children: set[int] = set()
        self._cleans_until = -SETTLE_S
        self._unreaped: dict[int, float] = {}  # when each was first seen

    def look(self) -> None:
        """Called again and again. Most calls do nothing, since a look is at all threads of this process."""
        now = self._clock()
        if now - self._looked_at < LOOK_S:
            return
        self._looked_at = now
        self._reap(now)
        own = children_of(os.getpid())
        before, self._children = self._children, {*own, *(each for child in own for each in children_of(child))}
        if before - self._children:
            self._cleans_until = now + SETTLE_S
        if now <= self._cleans_until:
            self._clean()

    def _reap(self, now: float) -> None:
        self._unreaped = {pid: self._unreaped.get(pid, now) for pid in unreaped_children_of(os.getpid())}
        for pid, since in self._unreaped.items():
            if now - since >= REAP_S:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)

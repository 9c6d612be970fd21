"""Running groups: their requests, their sessions, and their states for the display."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Generator

from titan_rl.rollout.group.rollouter import Callbacks


class RunningGroup:
    """Running group, with its requests in flight and its open sessions.

    Args:
        num_rollouts: Smallest number of rollouts of the group; a game has one for each seat.
        finish_session: Called with each session that gets no further request.
    """

    def __init__(self, num_rollouts: int, finish_session: Callable[[str], object]) -> None:
        self.idle = asyncio.Event()  # set while no request is in flight
        self.idle.set()
        self._num_rollouts = num_rollouts
        self._finish_session = finish_session
        self._num_requests = 0  # number of requests in flight
        self._num_ended = 0
        self._sessions: set[str] = set()
        self._callbacks = Callbacks()

    @property
    def state(self) -> str:
        """State of the group, by its name in `SLOT_STYLES` of the display."""
        if self._num_requests:
            return "generating"
        return "scoring" if self._num_ended >= self._num_rollouts else "in the environment"

    @contextlib.contextmanager
    def request(self, session_id: str | None) -> Generator[None]:
        """Count a request of a session for the length of the block."""
        if session_id is not None:
            self._sessions.add(session_id)
        self._num_requests += 1
        self.idle.clear()
        try:
            yield
        finally:
            self._num_requests -= 1
            if not self._num_requests:
                self.idle.set()

    def ended(self, rollout_id: str) -> None:
        """Note that a rollout of the group has ended, and finish its session."""
        self._num_ended += 1
        if rollout_id in self._sessions:
            self._finish(rollout_id)

    def end(self) -> None:
        """Finish the sessions that are still open. They belong to rollouts that were run again, were cancelled, or were
        lost with their process."""
        for session_id in sorted(self._sessions):
            self._finish(session_id)

    def _finish(self, session_id: str) -> None:
        self._sessions.discard(session_id)
        with self._callbacks.guarded("finish_session"):
            self._finish_session(session_id)


class RunningGroups:
    """Running groups of training or of a validation.

    Args:
        finish_session: Called with each session that gets no further request.
    """

    def __init__(self, finish_session: Callable[[str], object]) -> None:
        self._finish_session = finish_session
        self._groups: dict[RunningGroup, None] = {}
        self.num_done = 0

    @contextlib.contextmanager
    def one(self, num_rollouts: int) -> Generator[RunningGroup]:
        """Count a group for the length of the block."""
        group = RunningGroup(num_rollouts, self._finish_session)
        self._groups[group] = None
        try:
            yield group
        finally:
            del self._groups[group]
            self.num_done += 1
            group.end()

    def states(self) -> Counter[str]:
        return Counter(group.state for group in self._groups)

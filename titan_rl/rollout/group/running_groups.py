"""Running groups: their requests, their sessions, and their states for the display."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Generator, Iterable

from titan_rl.rollout.group.rollouter import Callbacks

ENVIRONMENTS, REWARDS = "environments or agents", "rewards"

Waits = dict[str, tuple[int, float]]
"""Number of the groups that wait for a part of a run, and the seconds of the longest wait, by the part's name."""


def join_waits(several: Iterable[Waits]) -> Waits:
    joined: Waits = {}
    for part, (count, seconds) in (item for waits in several for item in waits.items()):
        before = joined.get(part, (0, 0.0))
        joined[part] = before[0] + count, max(before[1], seconds)
    return joined


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
        self._since = asyncio.get_running_loop().time()  # beginning of the state
        self._scorer = ""
        self._num_ended = 0
        self._sessions: set[str] = set()
        self._callbacks = Callbacks()

    @property
    def state(self) -> str:
        """State of the group, by its name in `SLOT_STYLES` of the display."""
        if self._num_requests:
            return "generating"
        return "scoring" if self._num_ended >= self._num_rollouts else "in the environment"

    @property
    def waits_for(self) -> str:
        """Part of the run for which the group waits, for messages; "" while requests are in flight."""
        return {"generating": "", "scoring": self._scorer or REWARDS}.get(self.state, ENVIRONMENTS)

    @property
    def waits_s(self) -> float:
        """Seconds for which the group has waited for this part."""
        return asyncio.get_running_loop().time() - self._since

    def scored_by(self, scorer: str) -> None:
        """Note that the group waits for a scorer other than its rewards, which have ended."""
        self._scorer = scorer
        self._changed()

    def _changed(self) -> None:
        self._since = asyncio.get_running_loop().time()

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
                self._changed()

    def ended(self, rollout_id: str) -> None:
        """Note that a rollout of the group has ended, and finish its session."""
        self._num_ended += 1
        if self._num_ended == self._num_rollouts:
            self._changed()
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

    def waits(self) -> Waits:
        """Groups that wait for something else than generation."""
        return join_waits({group.waits_for: (1, group.waits_s)} for group in self._groups if group.waits_for)

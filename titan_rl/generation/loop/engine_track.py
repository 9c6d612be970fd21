"""What the thread of an engine does when: it generates, pulls weights, is paused, or has nothing to do."""

from __future__ import annotations

import time
from collections.abc import Callable

from titan_rl.core.tracing.spans import Track, count

REST_NS = 1_000_000
"""Between two steps, without one for so long, an engine rests; less belongs to its steps."""

TOLD_NS = 500_000_000
"""After so long steps without a rest are told of, many as one."""


class EngineTrack:
    """A lane of the timeline, and the seconds that metrics have of it."""

    def __init__(self, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self.clock_ns = clock_ns
        self._track = Track("engine", "generator", clock_ns)
        self._track.enter("idle", idle=True)
        self._begun_ns = clock_ns()  # of the steps that are told of next
        self._steps = self._tokens = 0

    def rested(self, began_ns: int, *, paused: bool) -> None:
        """There was nothing to decide from then until now."""
        if self.clock_ns() - began_ns > REST_NS:
            self._rest("paused" if paused else "idle", began_ns)

    def stepped(self, began_ns: int, num_tokens: int, num_running: int) -> None:
        """A step that began then has ended now."""
        if self._track.state != "generating" or began_ns - self._begun_ns >= TOLD_NS:
            self._tell()
            self._track.enter("generating", at_ns=began_ns)
            self._begun_ns = began_ns
            count("running requests", "generator", requests=num_running)
        self._steps += 1
        self._tokens += num_tokens

    def pulls(self, version: int) -> None:
        """A pull begins."""
        self._tell()
        self._track.enter("pull", kind="sync", version=version)

    def pulled(self) -> None:
        self._rest("idle", self.clock_ns())

    def take(self) -> dict[str, float]:
        """Seconds since it was last taken, as counts of an engine's gauges."""
        seconds = self._track.take()
        idle = seconds.pop("idle", 0.0) + seconds.pop("paused", 0.0)
        return {"idle_s": idle, "busy_s": sum(seconds.values())}

    def close(self) -> None:
        self._tell()
        self._track.close()

    def _rest(self, state: str, since_ns: int) -> None:
        if self._track.state == state:
            return
        self._tell()
        self._track.enter(state, idle=True, at_ns=since_ns)
        count("running requests", "generator", requests=0)

    def _tell(self) -> None:
        if self._steps:
            self._track.note(steps=self._steps, tokens=self._tokens)
        self._steps = self._tokens = 0

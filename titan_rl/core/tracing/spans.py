"""Spans and tracks of a process's timeline. Without a recorder they cost next to nothing, and still measure time.

A span is drawn in the lane of the surrounding span, or in a free lane of the pool that it names:

    with span("rollout", "environment", lane="rollout", rollout="g3/1"):
        with span("env step", "environment", fine=True) as took:
            ...
    took.seconds

A `Track` is a lane that is always in one state, and adds up the time in each state. Therefore the idle time in the
trace and in the metrics is the same.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import defaultdict
from collections.abc import Generator
from contextvars import ContextVar, Token
from pathlib import Path
from types import TracebackType
from typing import Any

from titan_rl.core.clock import CLOCK, Clock
from titan_rl.core.console import Console
from titan_rl.core.tracing.recorder import OpenLane, OpenSpan, TraceRecorder, Tracing

logger = logging.getLogger(__name__)

IDLE = "idle"
"""Category of spans in which the lane is idle."""

_recorder: TraceRecorder | None = None
_around: ContextVar[Span | None] = ContextVar("span", default=None)


@contextlib.contextmanager
def recording(folder: Path, process: str, most_bytes: int, console: Console) -> Generator[None]:
    """Record this process within the block, and the processes that it starts."""
    begin_recording(Tracing.begin(folder, most_bytes), process, console)
    try:
        yield
    finally:
        end_recording()


def begin_recording(tracing: Tracing | None, process: str, console: Console | None = None, host: str = "") -> None:
    """Record this process from now on; with None nothing is recorded.

    Args:
        tracing: Trace settings of the run.
        process: Name of the process and of its file.
        console: Shows why the trace ends early.
        host: Host of this process; by default the name of this machine.
    """
    global _recorder
    end_recording()
    if tracing is not None:
        _recorder = TraceRecorder(tracing, process, console, host)


def end_recording() -> None:
    """Stop recording, and write the remaining events."""
    global _recorder
    recorder, _recorder = _recorder, None
    if recorder is not None:
        recorder.close()


def flush() -> None:
    """Write all events so far: this process may be killed next."""
    if _recorder is not None:
        _recorder.add_parts(0.0)
        _recorder.flush()


def tracing_of_children() -> Tracing | None:
    """Trace settings for a process that this one starts."""
    return None if _recorder is None else _recorder.tracing


def count(name: str, kind: str, **values: float) -> None:
    """Record the values of a counter from now on."""
    if _recorder is not None:
        _recorder.count(name, kind, values)


def span(name: str, kind: str, *, lane: str | None = None, fine: bool = False, **args: Any) -> Span:
    """Make a context manager that records its block as a span.

    Args:
        kind: Category in the trace: the part of the run.
        lane: Pool of lanes; the span takes a free one. By default the lane of the surrounding span, or one of the pool
            `kind` if another task has an open span there.
        fine: One of many spans of a rollout, which are dropped first if the trace gets too large.
        args: Small values to record with the span.
    """
    return Span(name, kind, lane, fine, args)


class Span(OpenSpan):
    """Context manager that measures its block, and records it if there is a recorder; see `span`.

    Attributes:
        seconds: Duration of the block, once it has ended.
    """

    __slots__ = ("begin_ns", "lane", "pool", "seconds", "token")

    def __init__(self, name: str, kind: str, pool: str | None, fine: bool, args: dict[str, Any]) -> None:
        super().__init__(name, kind, fine, args)
        self.seconds = 0.0
        self.pool = pool
        self.lane: OpenLane | None = None  # None if it is not recorded
        self.token: Token[Span | None] | None = None
        self.begin_ns = 0

    def __enter__(self) -> Span:
        self.begin_ns = self.written_ns = time.monotonic_ns()
        if _recorder is not None:
            self._open(_recorder)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        now = time.monotonic_ns()
        self.seconds = (now - self.begin_ns) / 1e9
        if self.lane is not None:
            self._close(self.lane, now)

    def _open(self, recorder: TraceRecorder) -> None:
        around = _around.get()
        lane = None if around is None or self.pool is not None else around.lane
        if lane is None or lane.top is not around or lane.recorder is not recorder:
            lane = recorder.take_lane(self.pool or self.kind)
        self.lane, self.within = lane, lane.top
        lane.top = self
        self.token = _around.set(self)

    def _close(self, lane: OpenLane, now: int) -> None:
        if self.token is not None:
            with contextlib.suppress(ValueError):  # left in another task than it was entered in
                _around.reset(self.token)
        if self.cut_ns is None:
            lane.cut_above(self, now)
            lane.top = self.within
        lane.recorder.end(self, lane, now if self.cut_ns is None else self.cut_ns)
        if lane.top is None and self.cut_ns is None:
            lane.give_back()


class Track:
    """Lane of a timeline that is always in one state, and measures the time in each. Not thread-safe.

    Example:

        track = Track("engine", "generator")
        track.enter("generating")
        track.enter("idle", idle=True)
        track.take()  # {"generating": 1.25, "idle": 0.5}

    Args:
        lane: Pool from which the track takes a lane until it is closed.
        kind: Default category of the states.
        clock: Clock that measures the states.
    """

    def __init__(self, lane: str, kind: str, clock: Clock = CLOCK) -> None:
        self._pool = lane
        self._kind = kind
        self._clock = clock
        self._lane: OpenLane | None = None
        self._state: Span | None = None
        self._counted_ns = 0  # time up to which the current state is in the sums
        self._ns: defaultdict[str, int] = defaultdict(int)

    @property
    def state(self) -> str | None:
        """Name of the current state; None before the first."""
        return None if self._state is None else self._state.name

    def enter(
        self, name: str, *, kind: str | None = None, idle: bool = False, at_ns: int | None = None, **args: Any
    ) -> None:
        """Enter a state, now or at a given time. Spans of the same task are drawn in it.

        Args:
            idle: Whether the lane is idle in this state.
        """
        now = self._clock.now_ns() if at_ns is None else at_ns
        self._end(now)
        kind = kind or self._kind
        state = self._state = Span(name, f"{kind},{IDLE}" if idle else kind, self._pool, False, args)
        state.begin_ns = state.written_ns = self._counted_ns = now
        self._enter_lane(state)

    def note(self, **args: Any) -> None:
        """Add args to the current state."""
        if self._state is not None:
            self._state.args |= args

    def close(self) -> None:
        self._end(self._clock.now_ns())
        self._state = None
        if self._lane is not None:
            self._lane.give_back()
            self._lane = None

    def take(self) -> dict[str, float]:
        """Seconds by state since this was last called."""
        self._add_up(self._clock.now_ns())
        taken = {name: ns / 1e9 for name, ns in self._ns.items()}
        self._ns.clear()
        return taken

    def _enter_lane(self, state: Span) -> None:
        recorder = _recorder
        if recorder is None:
            return
        if self._lane is None or self._lane.recorder is not recorder:
            self._lane = recorder.take_lane(self._pool)
        state.lane = self._lane
        state.lane.top = state
        _around.set(state)

    def _end(self, now: int) -> None:
        self._add_up(now)
        state = self._state
        if state is not None and state.lane is not None:
            state.lane.cut_above(state, now)
            state.lane.recorder.end(state, state.lane, now)

    def _add_up(self, now: int) -> None:
        if self._state is not None:
            self._ns[self._state.name] += now - self._counted_ns
            self._counted_ns = now

"""Stopwatch of one rollout: the time that it uses itself. Standard library only.

Rollouts share engines, routers and the trainer's pauses, and waiting must not count against their time limits. A
stopwatch therefore runs while the rollout's environment works and while one of its requests is generated. Code that
makes the request wait pauses it:

    with stopwatch.paused():        # around a queue, a pause, an interruption
        await self._resumed.wait()

The rollouter sets the stopwatch of a rollout for each of its requests, and tasks made for the request inherit it.
Elsewhere `paused` does nothing. A `GenerateFn` that reports nothing counts as working all the time until its
completion arrives; the seconds that its metrics `queue_s` and `interrupted_s` name are then given back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar

ROUNDING_S = 1e-6  # timers may fire earlier by this much

_current: ContextVar[Stopwatch | None] = ContextVar("titan_rl_stopwatch", default=None)


class Stopwatch:
    """Counts seconds of an event loop, up to a limit. Made on that loop.

    Example:

        watch = Stopwatch(limit_s=300.0)
        with watch.running(), working_for(watch):
            await generate(...)
        watch.used_s

    Attributes:
        limit_s: Time limit.
        waited_s: Seconds of pauses in which the request is known to have waited.
        request_s: Total seconds of requests, from the call to the answer; concurrent requests count separately.
    """

    def __init__(self, limit_s: float) -> None:
        self.waited_s = 0.0
        self.request_s = 0.0
        self._loop = asyncio.get_running_loop()
        self.limit_s = limit_s
        self._used_s = 0.0
        self._since: float | None = None  # last start of counting; None while nothing is counted
        self._waiting_since: float | None = None
        self._starts = 0
        self._pauses: set[StopwatchPause] = set()
        self._timer: asyncio.TimerHandle | None = None  # after pauses it fires too early, and is set again
        self._at_limit: list[Callable[[], object]] = []
        self._enders: list[Callable[[], object]] = []
        self._has_ended_requests = False  # whether `end_requests` has called an ender

    @property
    def used_s(self) -> float:
        return self._used_s + (0.0 if self._since is None else self._loop.time() - self._since)

    @property
    def left_s(self) -> float:
        """Seconds left until the limit; negative after it."""
        return self.limit_s - self.used_s

    @property
    def is_over(self) -> bool:
        return self.left_s <= ROUNDING_S

    def start(self) -> None:
        """Begin to count the time until `stop` as the rollout's own, except for pauses."""
        self._starts += 1
        self._count()

    def stop(self) -> None:
        self._starts -= 1
        self._count()

    @contextmanager
    def running(self, at_limit: Callable[[], object] | None = None) -> Generator[None]:
        """Context between `start` and `stop`. Several contexts may overlap.

        Args:
            at_limit: Called once if the limit is reached within the block.
        """
        if at_limit is not None:
            self._at_limit.append(at_limit)
        self.start()
        try:
            yield
        finally:
            if at_limit is not None and at_limit in self._at_limit:
                self._at_limit.remove(at_limit)
            self.stop()

    def pause(self, *, waits: bool = True) -> StopwatchPause:
        """Stop counting until the pause is ended. Several pauses may overlap.

        Args:
            waits: Whether the request is known to wait.
        """
        pause = StopwatchPause(self, waits)
        self._pauses.add(pause)
        self._count()
        return pause

    def end_pause(self, pause: StopwatchPause) -> None:
        """End a pause, unless it has ended."""
        if pause in self._pauses:
            self._pauses.remove(pause)
            self._count()

    def correct(self, seconds: float) -> None:
        """Add seconds, or give them back if negative."""
        self._count(seconds)

    def forgive(self, seconds: float) -> None:
        """Deduct seconds that were counted, but were spent waiting."""
        self.waited_s += seconds
        self._count(-seconds)

    def end_requests(self) -> bool:
        """Make all requests return the tokens that they have; see `ending_with`. Returns whether any request can."""
        enders, self._enders = self._enders, []
        for end in enders:
            end()
        self._has_ended_requests = self._has_ended_requests or bool(enders)
        return self._has_ended_requests

    @contextmanager
    def ending_with(self, end: Callable[[], object]) -> Generator[None]:
        self._enders.append(end)
        try:
            yield
        finally:
            if end in self._enders:
                self._enders.remove(end)

    def _count(self, more_s: float = 0.0) -> None:
        """Add up the time that has passed, and continue or pause."""
        now = self._loop.time()
        if self._since is not None:
            self._used_s += now - self._since
        self._used_s += more_s
        self._since = now if self._starts and not self._pauses else None
        if self._waiting_since is not None:
            self.waited_s += now - self._waiting_since
        self._waiting_since = now if self._pauses and any(pause.waits for pause in self._pauses) else None
        if self._since is not None and self._at_limit and not self.is_over:
            self._check_limit_at(now + self.limit_s - self._used_s)
        elif self._timer is not None and not (self._starts and self._at_limit):
            self._timer.cancel()
            self._timer = None

    def _check_limit_at(self, when: float) -> None:
        if self._timer is not None:
            if self._timer.when() <= when:
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(when, self._check_limit)

    def _check_limit(self) -> None:
        self._timer = None
        if self._since is None or not self._at_limit:
            return
        if not self.is_over:
            self._check_limit_at(self._loop.time() + self.left_s)
            return
        due, self._at_limit = self._at_limit, []
        for at_limit in due:
            at_limit()


class StopwatchPause:
    """Pause of a stopwatch, until `end` or the end of its block; see `Stopwatch.pause`.

    Args:
        waits: Whether the request is known to wait.
    """

    def __init__(self, watch: Stopwatch, waits: bool) -> None:
        self.waits = waits
        self._watch = watch

    def end(self) -> None:
        """End the pause. Further calls do nothing."""
        self._watch.end_pause(self)

    def __enter__(self) -> StopwatchPause:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


def current() -> Stopwatch | None:
    """The stopwatch of the rollout whose request this task works on."""
    return _current.get()


@contextmanager
def working_for(watch: Stopwatch) -> Generator[None]:
    """Context in which `current` is `watch`, also in tasks created there."""
    token = _current.set(watch)
    try:
        yield
    finally:
        _current.reset(token)


def paused() -> AbstractContextManager[object]:
    """Context in which the request waits, and its rollout's time is not counted."""
    watch = current()
    return nullcontext() if watch is None else watch.pause()


def ending_with(end: Callable[[], object]) -> AbstractContextManager[None]:
    """Context of a request that calls `end` at the rollout's time limit; the request then returns the tokens that it
    has. Without this context it is cancelled."""
    watch = current()
    return nullcontext() if watch is None else watch.ending_with(end)


def time_is_up() -> bool:
    """Whether the rollout whose request this task works on has no time left."""
    watch = current()
    return watch is not None and watch.is_over


SILENCE_S = 3.0


@contextmanager
def moving_with_tokens(is_streamed: bool = True) -> Generator[Callable[[bool], None]]:
    """Context of a streamed request, in which time counts from the first tokens on. Call the yielded function for each
    message of the request: True if it has tokens, False if not, for example while the request waits in the engine.

    Before the first tokens, a request whose prompt is computed cannot be distinguished from one that queues; its answer
    reports the difference. Later silence counts for `SILENCE_S`, because a running engine sends messages more often.

    Args:
        is_streamed: Whether the request has such messages. Without them all time counts.
    """
    if (watch := current()) is None or not is_streamed:
        yield lambda has_tokens: None
        return
    with watch.pause(waits=False) as first:
        request = StreamedRequest(watch, first)
        try:
            yield request.on_message
        finally:
            request.end()


class StreamedRequest:
    """Starts and pauses a stopwatch by the messages of one streamed request.

    Args:
        watch: Stopwatch of the request's rollout.
        first: Pause that the first tokens end.
    """

    def __init__(self, watch: Stopwatch, first: StopwatchPause) -> None:
        self._loop = asyncio.get_running_loop()
        self._watch = watch
        self._first = first  # pause until the first tokens
        self._silence: StopwatchPause | None = None
        self._silent_at: float | None = None  # silence begins then without a message; None until the first tokens
        self._timer: asyncio.TimerHandle | None = None  # checks whether a message has come
        self._ended = False

    def on_message(self, has_tokens: bool) -> None:
        if self._ended or not (has_tokens or self._silent_at is not None):
            return
        now = self._loop.time()
        self._forgive_late_silence(now)
        if not has_tokens:
            self._fall_silent()
            return
        self._first.end()
        self._break_silence()
        self._silent_at = now + SILENCE_S
        if self._timer is None:
            self._timer = self._loop.call_at(self._silent_at, self._check_silence)

    def end(self) -> None:
        self._forgive_late_silence(self._loop.time())
        self._break_silence()
        if self._timer is not None:
            self._timer.cancel()
        self._ended = True

    def _check_silence(self) -> None:
        self._timer = None
        now = self._loop.time()
        if self._silence is not None or self._silent_at is None:
            return
        if now < self._silent_at - ROUNDING_S:
            self._timer = self._loop.call_at(self._silent_at, self._check_silence)
            return
        self._forgive_late_silence(now)
        self._fall_silent()

    def _fall_silent(self) -> None:
        if self._silence is None:
            self._silence = self._watch.pause()

    def _break_silence(self) -> None:
        if self._silence is not None:
            self._silence.end()
            self._silence = None

    def _forgive_late_silence(self, now: float) -> None:
        """Deduct silence that this loop noticed late because it was blocked."""
        if self._silence is None and self._silent_at is not None and now > self._silent_at:
            self._watch.forgive(now - self._silent_at)

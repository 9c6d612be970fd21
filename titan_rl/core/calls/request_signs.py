"""A rollout's time while its request is streamed: what is heard of the request says whether it works or waits. Standard
library only."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from contextlib import contextmanager

from titan_rl.core.calls import stopwatch

SILENCE_S = 3.0


@contextmanager
def moving_with_tokens(is_told: bool = True) -> Generator[Callable[[bool], None]]:
    """Within the block time counts from the first tokens on. What is yielded is told of each sign of the request:
    True if it brought tokens, False if it said that there are none, as of one that waits in the engine.

    Until the first tokens a request that computes its prompt cannot be told from one that queues; its answer says it.
    Later silence counts for `SILENCE_S`: an engine that steps gives a sign more often.

    Args:
        is_told: there will be signs. Without them all of the time counts.
    """
    if (watch := stopwatch.current()) is None or not is_told:
        yield lambda has_tokens: None
        return
    with watch.pause(waits=False) as first:
        signs = RequestSigns(watch, first)
        try:
            yield signs.came
        finally:
            signs.end()


class RequestSigns:
    """Sets a stopwatch going and standing by what is heard of one request.

    Args:
        first: ended by the first tokens.
    """

    def __init__(self, watch: stopwatch.Stopwatch, first: stopwatch.StopwatchPause) -> None:
        self._loop = asyncio.get_running_loop()
        self._watch = watch
        self._first = first  # until the first tokens
        self._silence: stopwatch.StopwatchPause | None = None
        self._silent_at: float | None = None  # if nothing comes by then; None until the first tokens
        self._timer: asyncio.TimerHandle | None = None  # looks whether something came meanwhile
        self._ended = False

    def came(self, has_tokens: bool) -> None:
        if self._ended or not (has_tokens or self._silent_at is not None):
            return
        now = self._loop.time()
        self._forgive_what_is_late(now)
        if not has_tokens:
            self._fall_silent()
            return
        self._first.end()
        self._break_silence()
        self._silent_at = now + SILENCE_S
        if self._timer is None:
            self._timer = self._loop.call_at(self._silent_at, self._look)

    def end(self) -> None:
        if not self._ended:
            self._forgive_what_is_late(self._loop.time())
            self._break_silence()
            if self._timer is not None:
                self._timer.cancel()
            self._ended = True

    def _look(self) -> None:
        self._timer = None
        now = self._loop.time()
        if self._silence is not None or self._silent_at is None:
            return
        if now < self._silent_at - stopwatch.ROUNDING_S:
            self._timer = self._loop.call_at(self._silent_at, self._look)
            return
        self._forgive_what_is_late(now)
        self._fall_silent()

    def _fall_silent(self) -> None:
        if self._silence is None:
            self._silence = self._watch.pause()

    def _break_silence(self) -> None:
        if self._silence is not None:
            self._silence.end()
            self._silence = None

    def _forgive_what_is_late(self, now: float) -> None:
        """The silence has gone on, and this loop, which something blocked, did not turn to see it."""
        if self._silence is None and self._silent_at is not None and now > self._silent_at:
            self._watch.forgive(now - self._silent_at)

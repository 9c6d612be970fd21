"""Waiting that others can cut short, and whose clock they can stop."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from titan_rl.core.calls import stopwatch
from titan_rl.core.calls.bounded import BoundedCall
from titan_rl.core.errors import GenerationError

T = TypeVar("T")


class NotResumedError(GenerationError):
    """A request met a pause that was not resumed within the limit: nobody's failure but the pausing one's."""


class Waiter:
    """Waits for one thing at a time, in `within`.

    Args:
        what: names it in messages.
        cancel_s: what is waited for has so long to end when it is cancelled.
    """

    def __init__(self, what: str, cancel_s: float) -> None:
        self.what = what
        self.was_cut_short = False  # the present wait was cut short by the router, and by nobody's failure
        self.interrupted_s = 0.0  # spent frozen, or waiting for a pause to end
        self._cancel_s = cancel_s
        self._call: BoundedCall[Any] | None = None  # what is waited for at present
        self._failure: Exception | None = None  # what the present wait was cut short with
        self._remaining_s: float | None = None  # of a frozen limit
        self._frozen_at: float | None = None
        self._freezes: list[tuple[float, float]] = []  # that have ended: from when, until when
        self._watch = stopwatch.current()
        self._stopwatch_pause: stopwatch.StopwatchPause | None = None  # of the rollout's time, while frozen

    async def within(
        self, seconds: float | None, coroutine: Coroutine[Any, Any, T], frozen_s: float | None = None
    ) -> T:
        """The coroutine's result, as a `BoundedCall` gives it.

        Args:
            seconds: None sets no limit.
            frozen_s: the wait begins frozen, for so long at most.

        Raises:
            TimeoutError: `seconds` have passed, not counting frozen ones, or `cut_short` was called.
            NotResumedError: it was frozen for too long.
            Exception: what `fail` was called with.
        """
        self.was_cut_short, self._failure = False, None
        call = self._call = BoundedCall(coroutine, self.what, cleanup_s=self._cancel_s, error_type=GenerationError)
        try:
            if seconds is not None:
                call.reschedule(asyncio.get_running_loop().time() + seconds)
            if frozen_s is not None:
                self.freeze(frozen_s)
            return await call.result()
        except TimeoutError as error:
            if not call.expired():
                raise
            if self._failure is not None:
                raise self._failure from None
            if self._frozen_at is not None and not self.was_cut_short:
                raise NotResumedError("frozen by a pause that was not resumed in time") from error
            raise TimeoutError("cut short" if self.was_cut_short else f"it took longer than {seconds:g} s") from error
        finally:
            self._call = None
            self._end_freeze()

    def _end_freeze(self) -> None:
        if self._frozen_at is not None:
            now = asyncio.get_running_loop().time()
            self.interrupted_s += now - self._frozen_at
            self._freezes.append((self._frozen_at, now))
        self._remaining_s = self._frozen_at = None
        if self._stopwatch_pause is not None:
            self._stopwatch_pause.end()
            self._stopwatch_pause = None

    def cut_short(self) -> None:
        """End the present wait with `TimeoutError`."""
        if self._is_waiting:
            self.was_cut_short = True
            self._cut()

    def fail(self, error: Exception) -> None:
        """End the present wait with `error`."""
        if self._is_waiting:
            self._failure = error
            self._cut()

    @property
    def _is_waiting(self) -> bool:
        """In a wait that nobody has cut short yet."""
        call = self._call
        return call is not None and not (call.expired() or self.was_cut_short or self._failure)

    def _cut(self) -> None:
        assert self._call is not None
        self._call.reschedule(asyncio.get_running_loop().time())

    def freeze(self, limit_s: float) -> None:
        """Stop the clock of the present wait, for `limit_s` at most."""
        if not self._is_waiting:
            return
        assert self._call is not None
        now = asyncio.get_running_loop().time()
        if self._frozen_at is None:
            self._frozen_at = now
            self._remaining_s = None if (when := self._call.when()) is None else when - now
            self._stopwatch_pause = None if self._watch is None else self._watch.pause()
        self._call.reschedule(now + limit_s)

    def thaw(self) -> None:
        """Let the clock run on, with what was left."""
        if not self._is_waiting or self._frozen_at is None:
            return
        assert self._call is not None
        now, remaining_s = asyncio.get_running_loop().time(), self._remaining_s
        self._end_freeze()
        self._call.reschedule(None if remaining_s is None else now + remaining_s)

    def frozen_s(self, begin: float, end: float) -> float:
        """Seconds between two times of the event loop that lie in freezes that have ended."""
        return sum(max(0.0, min(end, until) - max(begin, since)) for since, until in self._freezes)

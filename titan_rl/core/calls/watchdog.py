"""Watchdog of an event loop: reports that the loop is blocked, and which call blocks it."""

from __future__ import annotations

import asyncio
import logging
import math
import sys
import threading
import time
import traceback
from contextlib import suppress
from types import TracebackType

from titan_rl.core.calls.pulse import BLOCKED_AFTER_S, PULSE, kind_of, of_callback
from titan_rl.core.calls.user_code import innermost
from titan_rl.core.console import Console

logger = logging.getLogger(__name__)

_TICKS = 10  # checks during `blocked_after_s`

_ADVICE = {
    "environment": "Await instead, or let environments run in threads: rollout.env_in_thread = true",
    "reward": "Await instead, or let this reward run in threads: in_thread=True",
    "task": "A task's functions are called on the event loop, and cannot await: load and prepare data when the task is "
    "made, so that they only pick from it",
    "advantage": "An advantage function is called on the event loop, and must only compute: wait in a reward",
    "filter": "A filter is called on the event loop, and must only inspect its group: wait in a reward",
    "other": "Await instead, or let it run in a thread, for example with asyncio.to_thread",
}


class LoopWatchdog:
    """Thread that watches the event loop of the surrounding context.

    If the loop is blocked for `blocked_after_s`, the watchdog reports the blocking line, again after each doubling of
    the time, and then the end of the block. The log has the stack. While the loop is blocked nothing else runs,
    including time limits.

    Example of a message:

        the event loop has been blocked for 5 s: envs.py:17 in step blocks it. ...

    Args:
        console: Shows each message, which is also logged. It is called from the watching thread.
        blocked_after_s: Seconds after which a blocked loop is first reported.
    """

    def __init__(self, console: Console | None = None, blocked_after_s: float = BLOCKED_AFTER_S) -> None:
        self._console = console
        if not (isinstance(blocked_after_s, int | float) and 0 < blocked_after_s < math.inf):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"LoopWatchdog blocked_after_s is {blocked_after_s!r}; it must be positive and finite")
        self._blocked_after_s = blocked_after_s
        self._turned = threading.Event()
        self._ended = threading.Event()

    def __enter__(self) -> LoopWatchdog:
        PULSE.open()
        PULSE.beat()  # the thread may not run before a call holds the GIL
        self._loop = asyncio.get_running_loop()
        self._thread_id = threading.get_ident()
        self._thread = threading.Thread(target=self._watch, name="loop-watchdog", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ended.set()
        self._turned.set()
        self._thread.join()
        PULSE.rest()

    def _watch(self) -> None:
        tick = self._blocked_after_s / _TICKS
        while not self._ended.wait(tick):
            PULSE.beat()
            self._turned.clear()
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._turn)
                self._wait_for_turn(tick)

    def _turn(self) -> None:
        PULSE.returned()
        self._turned.set()

    def _wait_for_turn(self, tick: float) -> None:
        began, ticks, reported_at = time.monotonic(), 0, 0
        while not self._turned.wait(tick):
            if self._ended.is_set():  # the loop's thread is in `__exit__`, and waits for this thread
                return
            PULSE.beat()
            if self._thread_id == threading.main_thread().ident:
                PULSE.interrupt_if_late(ticks * tick)
            ticks += 1  # not seconds: a process that was stopped has not been blocked
            if ticks >= max(_TICKS, 2 * reported_at):
                reported_at = ticks
                self._report_blocker(ticks * tick)
        took = time.monotonic() - began
        if reported_at:
            self._report(f"the event loop continues after {took:.0f} s")
        elif took >= self._blocked_after_s:  # this thread could not run either
            self._report(
                f"the event loop and all threads have been blocked for {took:.0f} s: the process was stopped, "
                "or a call held the GIL, as a slow regular expression does"
            )

    def _report_blocker(self, seconds: float) -> None:
        frame = sys._current_frames().get(self._thread_id)  # pyright: ignore[reportPrivateUsage]
        if frame is None:
            return
        stack = traceback.extract_stack(frame)
        callback = of_callback(stack)
        blocker = innermost(callback) or f"{stack[-1].filename}:{stack[-1].lineno} in {stack[-1].name}"
        logger.warning("the event loop is blocked at:\n%s", "".join(traceback.format_list(stack)))
        self._report(
            f"the event loop has been blocked for {seconds:.0f} s: {blocker} blocks it, and nothing else runs. "
            f"{_ADVICE[kind_of(callback)]}"
        )

    def _report(self, text: str) -> None:
        logger.warning("%s", text)
        if self._console is not None:
            try:
                self._console.warning(text)
            except BaseException as error:  # the watchdog continues if the console fails
                logger.warning("the message was not shown: %r", error)

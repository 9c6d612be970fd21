"""Ctrl-C and SIGTERM: the first stops a run in order, a second ends it at once."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Generator
from types import FrameType, TracebackType

from titan_rl.core.calls.plain import terminal_text
from titan_rl.run.machine.guard import ONE_STOP_S, STOPS

REACTION_S = 3.0


class StopSignals:
    """Handles both signals for the length of a block, in the main thread.

    Python runs the handlers between two instructions of the main thread, and so also while a user's code keeps the
    event loop from running. Where a call of native code keeps Python's lock they wait, and the guard acts.

    A SIGINT that whoever started the program had it ignore, as shells do for commands in the background, stays ignored.

    Args:
        stopping: says what the first signal does. An attribute, for a program that changes what it is at.
        ending: says what is left after the second.
        tell: shows a text at once, from within a signal handler; by default on standard error.
        reaction_s: without a reaction for so long it is told that the event loop is held up.
    """

    def __init__(
        self,
        stopping: str,
        ending: str,
        tell: Callable[[str], None] | None = None,
        *,
        reaction_s: float = REACTION_S,
    ) -> None:
        self.received: signal.Signals | None = None  # the first
        self.tell = tell or tell_on_stderr
        self.stopping = stopping
        self._ending = ending
        self._reaction_s = reaction_s
        self._stop: Callable[[], object] | None = None
        self._received_at = 0.0
        self._reacted = threading.Event()
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> StopSignals:
        for number in STOPS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._reacted.set()
        for number, handler in self._before.items():
            signal.signal(number, handler)  # pyright: ignore[reportArgumentType]

    @contextlib.contextmanager
    def stopping_with(self, stop: Callable[[], object]) -> Generator[None]:
        """Within the block the first signal calls `stop`, from within its handler; at once if it has come already."""
        self._stop = stop
        if self.received is not None:
            stop()
        try:
            yield
        finally:
            self._stop = None
            self._reacted.set()

    def stop(self) -> None:
        """As if SIGTERM had come, where no signal has."""
        if self.received is None:
            self._handle(signal.SIGTERM, None)

    def reacted(self) -> None:
        """The run has begun to stop."""
        self._reacted.set()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self.received is None:
            self.received, self._received_at = signal.Signals(number), time.monotonic()
            self.tell(f"{name}: {self.stopping}")
            threading.Thread(target=self._wait_for_reaction, name="stop", daemon=True).start()
            if self._stop is not None:
                self._stop()
        elif time.monotonic() - self._received_at > ONE_STOP_S:
            self.tell(f"{name}: {self._ending}")
            os._exit(128 + number)

    def _wait_for_reaction(self) -> None:
        if not self._reacted.wait(self._reaction_s):
            self.tell(
                f"nothing has been stopped for {self._reaction_s:g} s: the event loop is held up, by imports at the "
                "start or by code of an environment or a reward; once more ends the run at once"
            )


def tell_on_stderr(text: str) -> None:
    """Not through Python's own buffers, whose locks may be held by what a handler interrupts."""
    with contextlib.suppress(OSError):  # nobody reads it
        os.write(2, f"titan-rl: {terminal_text(text)}\n".encode())

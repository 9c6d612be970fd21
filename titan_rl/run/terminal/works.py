"""What a command is at that may take long: a person is to see that it goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from types import TracebackType

from titan_rl.run.terminal.figures import format_seconds

SHOWN_AFTER_S = 2.0
TOLD_AFTER_S = 10.0
TOLD_EVERY_S = 30.0


class Work:
    """One of them, as a context manager.

    Args:
        text: "starting 2 generators".
        note: says more of how far it is, when asked.
    """

    def __init__(self, works: Works, text: str, note: Callable[[], str] | None, began: float) -> None:
        self._works = works
        self.text = text
        self.began = began
        self.num_told = 0
        self._note = note

    @property
    def note(self) -> str:
        return self._note() if self._note is not None else ""

    def __enter__(self) -> Work:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._works.ended(self, failed=error is not None)

    def described(self, seconds: float, leave_out: Collection[str] = ()) -> str:
        """
        Args:
            leave_out: notes that are shown elsewhere.

        Example: "validating at step 0, 12.0 s: 3 of 64 groups"
        """
        note = self.note
        return f"{self.text}, {format_seconds(seconds)}{f': {note}' if note and note not in leave_out else ''}"


class Works:
    """Those of a command, which may be several at a time and of several threads.

    Args:
        tell: shows a line, where there is no display that is drawn again and again.
        clock: seconds.
    """

    def __init__(self, tell: Callable[[str], None], clock: Callable[[], float]) -> None:
        self._tell = tell
        self._clock = clock
        self._lock = threading.Lock()
        self._works: list[Work] = []
        self._over = threading.Event()
        self._ticking: threading.Thread | None = None
        self.tells = False
        """Whether lines are told of those that take long."""

    def begin(self, text: str, note: Callable[[], str] | None = None) -> Work:
        work = Work(self, text, note, self._clock())
        with self._lock:
            self._works.append(work)
        return work

    def ended(self, work: Work, *, failed: bool) -> None:
        with self._lock:
            self._works.remove(work)
        if work.num_told and self.tells and not failed:
            self._tell(f"{work.text} took {format_seconds(self._clock() - work.began)}")

    def shown(self, after_s: float = SHOWN_AFTER_S) -> Sequence[tuple[Work, float]]:
        """Those that have gone on for a while, with how long, in seconds."""
        now = self._clock()
        with self._lock:
            return [(work, now - work.began) for work in self._works if now - work.began >= after_s]

    def tick(self) -> None:
        """Tell of those that it is time to tell of: once after `TOLD_AFTER_S`, then every `TOLD_EVERY_S`."""
        for work, seconds in self.shown(TOLD_AFTER_S):
            due = 1 + int(seconds // TOLD_EVERY_S)
            if work.num_told < due:
                work.num_told = due
                self._tell(f"still {work.described(seconds)}")

    def start_ticking(self) -> None:
        """In a thread of its own: what takes long may hold up the others. A daemon, so that it keeps nothing from
        ending."""
        self.tells = True
        self._ticking = threading.Thread(target=self._tick_on, name="works", daemon=True)
        self._ticking.start()

    def stop_ticking(self) -> None:
        self.tells = False
        self._over.set()
        if self._ticking is not None and self._ticking is not threading.current_thread():
            self._ticking.join(SHOWN_AFTER_S)

    def _tick_on(self) -> None:
        while not self._over.wait(1.0):
            self.tick()

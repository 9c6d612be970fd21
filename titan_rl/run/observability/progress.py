"""Progress display of a command: live lines on a terminal, and one plain line per step elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import sys
import threading
from collections import deque
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from types import TracebackType
from typing import Protocol, TextIO

from rich.text import Text

from titan_rl.core.clock import CLOCK, Clock
from titan_rl.core.console import Console, Verbosity
from titan_rl.run.terminal.live_display import ForgivingConsole, LiveLines, RunLook, View, format_seconds, layout
from titan_rl.run.terminal.standard_streams import StderrConsole, write_stderr_unbuffered
from titan_rl.run.terminal.waiting import SHOWN_AFTER_S

STOP_WITHIN_S = 2.0
REPORT_AFTER_S = 10.0
REPORT_EVERY_S = 30.0


@dataclass(slots=True, eq=False)
class Operation:
    """Operation that may take long.

    Attributes:
        text: Name of the operation, such as "starting 2 generators".
        note: Function that returns a note on its progress.
        num_reports: Number of lines about it so far.
    """

    text: str
    note: Callable[[], str] | None
    began: float
    num_reports: int = 0

    def described(self, seconds: float, leave_out: Collection[str] = ()) -> str:
        """Describe the operation.

        Args:
            leave_out: Notes to leave out because they are shown elsewhere.

        Example: "validating at step 0, 12.0 s: 3 of 64 groups"
        """
        note = "" if self.note is None else self.note()
        return f"{self.text}, {format_seconds(seconds)}{f': {note}' if note and note not in leave_out else ''}"


class Operations:
    """Running operations of a command. Several may run at a time, in several threads.

    Args:
        console: Console for lines about long operations, if there is no live display.
    """

    def __init__(self, console: Console, clock: Clock) -> None:
        self._console = console
        self._clock = clock
        self._lock = threading.Lock()
        self._operations: list[Operation] = []
        self._over = threading.Event()
        self._ticking: threading.Thread | None = None
        self.shows_lines = False
        """Whether lines about long operations are shown."""

    @contextlib.contextmanager
    def running(self, text: str, note: Callable[[], str] | None = None) -> Generator[None]:
        """Track an operation during a block; see `Progress.working`."""
        operation = Operation(text, note, self._clock.now())
        with self._lock:
            self._operations.append(operation)
        try:
            yield
        finally:
            with self._lock:
                self._operations.remove(operation)
        if operation.num_reports and self.shows_lines:
            self._console.message(f"{operation.text} took {format_seconds(self._clock.now() - operation.began)}")

    def shown(self, after_s: float = SHOWN_AFTER_S) -> Sequence[tuple[Operation, float]]:
        """List the operations that have run for at least `after_s` seconds, with their durations in seconds."""
        now = self._clock.now()
        with self._lock:
            return [
                (operation, now - operation.began) for operation in self._operations if now - operation.began >= after_s
            ]

    def tick(self) -> None:
        """Show lines about long operations: first after `REPORT_AFTER_S`, then every `REPORT_EVERY_S`."""
        for operation, seconds in self.shown(REPORT_AFTER_S):
            due = 1 + int(seconds // REPORT_EVERY_S)
            if operation.num_reports < due:
                operation.num_reports = due
                self._console.message(f"still {operation.described(seconds)}")

    def start_ticking(self) -> None:
        """Show lines from a separate thread, because a long operation may block the other threads. The thread is a
        daemon, so that it does not keep the program from ending."""
        self.shows_lines = True
        self._ticking = threading.Thread(target=self._tick_on, name="operations", daemon=True)
        self._ticking.start()

    def stop_ticking(self) -> None:
        self.shows_lines = False
        self._over.set()
        if self._ticking is not None and self._ticking is not threading.current_thread():
            self._ticking.join(STOP_WITHIN_S)

    def _tick_on(self) -> None:
        while not self._over.wait(1.0):
            self.tick()


@dataclass(frozen=True, slots=True)
class ShownStep:
    """Finished step, as the display shows it.

    Attributes:
        step: Number of the step, counted from 1.
        seconds: Duration of the step.
        curve: The most important figure: its name, its value, and a note, which may be empty.
        figures: Other figures, by name.
    """

    step: int
    seconds: float
    curve: tuple[str, float, str]
    figures: Mapping[str, str] = field(default_factory=dict[str, str])


_ETA_STEPS = 10  # number of last steps from which the remaining time is estimated
_LOOK_EVERY_S = 0.5


class FollowedRun(Protocol):
    """Run whose generation is shown."""

    def look(self) -> RunLook:
        """Take a snapshot of generation."""
        ...


class Progress(StderrConsole):
    """Progress display of a command, as a context manager. `message` also works before and after its block.

    Args:
        total: Number of steps of the run, or of other units; 0 if nothing is counted.
        file: File to write to. Defaults to standard error.
        unit: Name of a unit.
        vanish: Whether the live display is removed at the end.

    Example of a line without a terminal:

        step   3/100  reward 0.512  tokens/s  21034  staleness 0.8  1.92 s
    """

    def __init__(
        self,
        total: int,
        file: TextIO | None = None,
        *,
        verbosity: Verbosity = Verbosity.NORMAL,
        unit: str = "step",
        vanish: bool = False,
        clock: Clock = CLOCK,
    ) -> None:
        self._total = total
        self._unit = unit
        self._vanish = vanish
        self._verbosity = verbosity
        self._clock = clock
        self._began = clock.now()
        self._console = ForgivingConsole(file or sys.stderr)
        self._operations = Operations(self, clock)
        self._live: LiveLines | None = None
        self._last: ShownStep | None = None
        self._values: list[float] = []
        self._durations: deque[float] = deque(maxlen=_ETA_STEPS)
        self._look: RunLook | None = None
        self._log_handler: logging.Handler | None = None

    def __enter__(self) -> Progress:
        if self._verbosity is Verbosity.VERBOSE:
            self._log_handler = _LogLines(self)
            logging.getLogger("titan_rl").addHandler(self._log_handler)
        if self._verbosity is Verbosity.QUIET:
            return self
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = LiveLines(self._console, self, vanish=self._vanish)
            self._live.start(refresh=True)
        else:
            self._operations.start_ticking()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._operations.stop_ticking()
        if self._log_handler is not None:
            logging.getLogger("titan_rl").removeHandler(self._log_handler)
        self._end_live()

    def refresh(self) -> None:
        """Draw the live display now. It is also drawn several times a second."""
        if self._live is not None:
            self._live.refresh()

    def message(self, text: str) -> None:
        """Print a line above the live display."""
        if self._verbosity is not Verbosity.QUIET:
            self._console.print(Text(text, style="dim" if self._live else ""))

    def warning(self, text: str) -> None:
        """Print a line as `message` does, even if the command is quiet."""
        self._console.print(Text(text, style="yellow" if self._live else ""))

    def end_with(self, text: str) -> None:
        """End the live display and print a line on standard error. A signal handler may call this."""
        self._end_live()
        write_stderr_unbuffered(text)

    def working(self, text: str, note: Callable[[], str] | None = None) -> contextlib.AbstractContextManager[None]:
        """Track an operation that may take long, during a block. If it takes long, its name and duration are shown in
        the live display or, without one, as a line now and then.

        Args:
            text: Name of the operation, such as "starting 2 generators".
            note: Function that returns a note on the operation's progress. It is called from another thread.

        Example: `with progress.working("validating", lambda: f"{done} of 64 groups"): ...`
        """
        return self._operations.running(text, note)

    async def follow(self, run: FollowedRun) -> None:
        """Show snapshots of generation, refreshed until this is cancelled."""
        try:
            while True:
                self._look = run.look()
                await asyncio.sleep(_LOOK_EVERY_S)
        finally:
            self._look = None

    def count(self, total: int) -> None:
        """Restart the count with a new total."""
        self._total, self._last = total, None
        self._values.clear()
        self._durations.clear()

    def counted(self) -> str:
        """Describe the number of units so far, as a note for `working`."""
        return f"{self._last.step if self._last else 0} of {self._total} {self._unit}s"

    def slots(self) -> str:
        """Describe the number of groups in each state, if known, as a note for `working`."""
        return "" if self._look is None else self._look.describe_slots()

    def step(self, report: ShownStep) -> None:
        """Show a finished step."""
        self.reached(report)
        if self._live is not None or self._verbosity is Verbosity.QUIET:
            return
        name, value, note = report.curve
        width = len(str(self._total))
        figures = "  ".join(f"{label} {figure}" for label, figure in report.figures.items())
        self._console.print(
            f"{self._unit} {report.step:>{width}}/{self._total}  {name} {value:.3f}{note}  {figures}  "
            f"{report.seconds:.2f} s"
        )

    def reached(self, report: ShownStep) -> None:
        """Show a finished step in the live display only."""
        self._last = report
        self._values.append(report.curve[1])
        self._durations.append(report.seconds)

    def _end_live(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def lines(self) -> Sequence[Text]:
        """Lines of the live display now."""
        size = self._console.size
        return layout(self._view(), size.width, size.height, ascii_only=self._console.options.ascii_only)

    def _view(self) -> View:
        last, done = self._last, self._last.step if self._last else 0
        left = fmean(self._durations) * (self._total - done) if self._durations else math.nan
        seen = {self.slots(), self.counted()}  # notes that other parts of the display show
        operations = [one.described(seconds, leave_out=seen) for one, seconds in self._operations.shown()]
        elapsed = self._clock.now() - self._began
        if last is None:
            return View(self._unit, done, self._total, left, elapsed, look=self._look, works=operations)
        name, value, note = last.curve
        figures = {**last.figures, f"s/{self._unit}": f"{last.seconds:.2f}"}
        curve = name, tuple(self._values), value, note
        return View(self._unit, done, self._total, left, elapsed, curve, figures, self._look, operations)


@contextlib.contextmanager
def status(text: str, verbosity: Verbosity = Verbosity.NORMAL) -> Generator[None]:
    """Show on standard error what a command is doing during a block, and remove the text afterwards."""
    with Progress(0, sys.stderr, verbosity=verbosity, vanish=True) as progress, progress.working(text):
        yield


class _LogLines(logging.Handler):
    """Log handler that prints records on a console."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.INFO)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        self._console.message(f"{record.levelname.lower()}: {record.getMessage()}")

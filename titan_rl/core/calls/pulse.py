"""Pulse of a process, which shows another process whether Python code can run in it.

A call in C may hold Python's global interpreter lock (GIL) for any time, as a backtracking regular expression does.
Then no thread of its process can report it or keep its time limit. Another process can:

    Pulse        in the process: beats in shared memory, and interrupts user code of the main thread that is late
    PulseReader  in another process: finds that the beats have stopped, and where; asks for the interruption

The stack of the thread that holds the GIL is written by faulthandler, whose signal handler needs no GIL.

Standard library only.
"""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import functools
import math
import mmap
import os
import re
import signal
import struct
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from titan_rl.core.calls.bounded import OutOfTimeError
from titan_rl.core.calls.user_code import callers, innermost, record_location

BLOCKED_AFTER_S = 5.0
"""Seconds after which a blocking call is reported."""
INTERRUPT_S = 5.0
"""Seconds after its time limit in which a call may be interrupted, before only the end of its process remains."""
STOP_S = 3.0
"""Seconds after a stop signal in which a call may return, whatever its time limit is."""

CALLERS = {  # module and function of titan_rl that call code of each kind
    ("rollout/group/user_code_boundary.py", "make"): "environment",
    ("rollout/environment/threaded.py", "run"): "environment",
    ("rollout/group/rollout.py", "_checked_env"): "environment",
    ("rollout/rewards/reward.py", "call"): "reward",
    ("rollout/rewards/reward.py", "_awaited"): "reward",
    ("run/stages/rollout_stage.py", "train_sample"): "task",
    ("run/stages/rollout_stage.py", "validation_samples"): "task",
    ("rollout/task.py", "drop_reason"): "task",
    ("rollout/rewards/advantages.py", "compare"): "advantage",
    ("scheduling/filters.py", "_reason"): "filter",
}


def kind_of(frames: Sequence[traceback.FrameSummary]) -> str:
    """Kind of the user code in a stack, outermost frame first: a value of `CALLERS`, or "other"."""
    return next((CALLERS[caller] for caller in callers(frames) if caller in CALLERS), "other")


def of_callback(frames: list[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """The frames of the callback that an event loop is running, outermost first; all without an event loop."""
    starts = [i for i, one in enumerate(frames) if one.name == "_run" and one.filename == asyncio.events.__file__]
    return frames[starts[-1] + 1 :] if starts else frames


class CallInterrupted(BaseException):
    """Interruption of user code that blocks for longer than its time limit. User code seldom catches it, since it is no
    `Exception`."""


# Two signals, because a handler in Python would let the pulse beat once. Nobody else uses them.
_WRITE_STACK = signal.SIGVTALRM
_INTERRUPT = signal.SIGRTMAX - 1
_HERE = str(Path(__file__).parents[2])  # code of titan_rl, which is not interrupted
# Beats; limits of the call in the main thread, of calls in threads, and of environments; whether it is interruptible;
# whether interrupted code still runs; advice.
_STATE = struct.Struct("=Qddd??256p")


class LimitedCall:
    """Context manager around a blocking call of user code. Made by `Pulse.limited`.

    Raises:
        OutOfTimeError: the call was interrupted, even if it handled that itself. Names its line.
        CancelledError: the call was interrupted after a stop signal.
        RuntimeError: the call used signals outside the main thread, even if it handled the error of that.
    """

    def __init__(self, pulse: Pulse, limit_s: float) -> None:
        self.limit_s = limit_s
        self.is_interrupted = False
        self.location: str | None = None  # line of user code at which it was interrupted
        self.began = 0.0
        self.is_in_main = False
        self.used_signals: list[str] = []  # lines at which it used signals outside the main thread
        self._pulse = pulse

    def __enter__(self) -> LimitedCall:
        self.began = time.monotonic()
        self.is_in_main = threading.current_thread() is threading.main_thread()
        if not self.is_in_main:
            _record_signal_use()
            _call_in_thread.set(self)
        self._pulse.begin(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._pulse.end(self)
        _call_in_thread.set(None)
        if self.used_signals:
            failure = RuntimeError(NO_SIGNALS)
            record_location(failure, self.used_signals[0] or None)
            raise failure from error
        if self.is_interrupted and self._pulse.stopped_at < math.inf:
            raise asyncio.CancelledError from None  # it has not failed: the program is being cancelled
        if self.is_interrupted:
            late = OutOfTimeError(f"it took longer than {self.limit_s:g} s")
            record_location(late, self.location)
            raise late from None


NO_SIGNALS = (
    "it uses signals, as a time limit by signal.alarm does, and they work in the main thread alone; let it run there "
    "(in_thread=False, reward_in_thread = false, a script in place of a notebook), or turn off its time limit "
    "(math_verify: parsing_timeout=None, timeout_seconds=None)"
)
_call_in_thread: ContextVar[LimitedCall | None] = ContextVar("_call_in_thread", default=None)


@functools.cache
def _record_signal_use() -> None:
    """Record the calls of `signal.signal` that fail in threads, whose errors user code often turns into values."""
    module: Any = sys.modules["_signal"]
    original = module.signal

    def recording(number: int, handler: Any) -> Any:
        if (call := _call_in_thread.get()) is not None:
            call.used_signals.append(innermost(traceback.extract_stack()) or "")
        return original(number, handler)

    module.signal = recording  # `signal.signal` calls it


class Pulse:
    """Pulse of this process. A thread beats while the process is watched; see `LoopWatchdog`.

    Attributes:
        stopped_at: Time of the stop signal that cancels the program; infinite without one.
    """

    def __init__(self) -> None:
        self.stopped_at = math.inf
        self.descriptor: int | None = None  # of the shared memory, once it is open
        self._lock = threading.Lock()
        self._calls: list[LimitedCall] = []
        self._num_beats = 0
        self._beat_at = 0.0
        self._blocked_from = math.inf  # beat before the last: a thread may beat just before `_handle` runs
        self._env_limit_s = math.inf
        self._interrupts = False

    def open(self) -> int | None:
        """Make the shared memory, and return its descriptor for `PulseReader`; None if the system lacks it. Only if the
        main thread is the first to call this can its calls be interrupted."""
        if self.descriptor is None and hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("pulse")
            os.ftruncate(descriptor, _STATE.size)
            self._state = mmap.mmap(descriptor, _STATE.size)
            stacks = os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_APPEND)
            self._interrupts = threading.current_thread() is threading.main_thread()
            if self._interrupts:
                signal.signal(_INTERRUPT, self._handle)
                struct.pack_into("=?", self._state, 32, True)
            faulthandler.register(_WRITE_STACK, stacks, all_threads=True)
            self.descriptor = descriptor  # last, because other threads write once it is set
        return self.descriptor

    def beat(self) -> None:
        self._blocked_from, self._beat_at = self._beat_at, time.monotonic()
        self._num_beats += 1
        self._write(self._num_beats)

    def rest(self) -> None:
        """Beat no more. Nothing is reported until the next beat."""
        self._write(0)

    def returned(self) -> None:
        """Note that no interrupted code runs in the main thread, if this is the main thread."""
        if threading.current_thread() is threading.main_thread():
            self._mark_interrupted(False)

    def advise(self, advice: str) -> None:
        """Set the advice to show if this process is killed because of a call."""
        if self.open() is not None:
            struct.pack_into("=256p", self._state, 34, advice.encode())

    def limit_environments(self, limit_s: float) -> None:
        """Set the time limit of environments that block."""
        self._env_limit_s = limit_s

    def limited(self, limit_s: float | None) -> LimitedCall:
        """Limit the time of the blocking call in the block."""
        return LimitedCall(self, math.inf if limit_s is None else limit_s)

    def begin(self, call: LimitedCall) -> None:
        with self._lock:
            self._calls.append(call)
            self._write_limits()

    def end(self, call: LimitedCall) -> None:
        with self._lock:
            self._calls.remove(call)
            self._write_limits()
            if call.is_interrupted:
                self._mark_interrupted(False)

    def interrupt_if_late(self, blocked_s: float) -> None:
        """Interrupt user code with which the main thread has been blocked for `blocked_s`, if its time is up."""
        began = time.monotonic() - blocked_s
        if self._interrupts and (self._is_late(began, self._env_limit_s) or self._late_call() is not None):
            self._blocked_from = began
            signal.pthread_kill(threading.main_thread().ident or 0, _INTERRUPT)

    def _late_call(self) -> LimitedCall | None:
        """Innermost call of the main thread whose time is up."""
        calls = (call for call in self._calls[::-1] if call.is_in_main)
        return next((call for call in calls if self._is_late(call.began, call.limit_s)), None)

    def _is_late(self, began: float, limit_s: float) -> bool:
        now = time.monotonic()
        return now - began >= limit_s or now - max(began, self.stopped_at) >= STOP_S

    def _handle(self, number: int, frame: FrameType | None) -> None:
        frames = of_callback(traceback.extract_stack(frame))
        call = self._late_call()
        if call is not None and frames and not frames[-1].filename.startswith(_HERE):
            call.is_interrupted, call.location = True, innermost(frames)
        elif kind_of(frames) != "environment" or not self._is_late(self._blocked_from, self._env_limit_s):
            return
        self._mark_interrupted(True)
        raise CallInterrupted(f"it blocked for longer than {self._env_limit_s if call is None else call.limit_s:g} s")

    def _write(self, num_beats: int) -> None:
        if self.descriptor is not None:
            struct.pack_into("=Q", self._state, 0, num_beats)

    def _mark_interrupted(self, is_interrupted: bool) -> None:
        if self.descriptor is not None:
            struct.pack_into("=?", self._state, 33, is_interrupted)

    def _write_limits(self) -> None:
        if self.descriptor is not None:
            main = next((call.limit_s for call in self._calls[::-1] if call.is_in_main), 0.0)
            longest = max((call.limit_s for call in self._calls if not call.is_in_main), default=0.0)
            struct.pack_into("=ddd", self._state, 8, main, longest, self._env_limit_s)


PULSE = Pulse()


@dataclass(frozen=True, slots=True)
class HeldInterpreter:
    """Finding of a `PulseReader`: a call that holds the GIL, or goes on after its interruption.

    Args:
        where: Line of user code, "rewards.py:12 in right".
        seconds: Time for which it has computed so far, or gone on.
        limit_s: Its time limit; infinite if it has none.
        late_s: Time since it should have ended; negative before.
        is_interrupted: Whether it goes on after its interruption.
        advice: Advice of the process, see `Pulse.advise`.
    """

    where: str
    seconds: float
    limit_s: float
    late_s: float
    is_interrupted: bool
    advice: str

    @property
    def is_late(self) -> bool:
        return self.late_s >= 0

    @property
    def is_lost(self) -> bool:
        """Whether it was not interrupted in time, so that its process must end."""
        return self.late_s >= INTERRUPT_S

    def __str__(self) -> str:
        if self.is_interrupted:
            return f"{self.where} goes on after its interruption, for {self.seconds:.0f} s so far"
        return (
            f"{self.where} has held Python's interpreter lock (GIL) for {self.seconds:.0f} s, as a slow regular "
            "expression does, and nothing else runs in its process"
        )


class PulseReader:
    """Reader of the pulse of another process of this user on this host.

    Args:
        pid: Id of the process, which must not be reaped while this object is used.
        descriptor: `Pulse.descriptor` of that process.
        longest_look_s: Most time that counts between two looks: if this process was stopped, so was the other.

    Raises:
        OSError: The process has ended.
    """

    def __init__(self, pid: int, descriptor: int, longest_look_s: float) -> None:
        self._pid = pid
        self._file = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
        self._longest_look_s = longest_look_s
        self._num_beats = 0
        self._looked_at = 0.0
        self._times: dict[int, float] = {}  # by thread
        self._thread = pid  # the busiest
        self._held_s = 0.0
        self._has_asked = self._is_interruptible = self._is_interrupted = False

    def look(self, now: float, stopped_s: float = -math.inf) -> HeldInterpreter | None:
        """Return what holds the GIL, or goes on after its interruption, if that is the case for `BLOCKED_AFTER_S`.
        Called about every second.

        Args:
            stopped_s: Time since a stop signal.
        """
        state = _STATE.unpack(os.pread(self._file, _STATE.size, 0))
        num_beats, main_s, threads_s, env_limit_s, self._is_interruptible, is_interrupted, advice = state
        passed, self._looked_at = min(now - self._looked_at, self._longest_look_s), now
        has_beaten, self._num_beats = num_beats != self._num_beats, num_beats
        if not num_beats or is_interrupted != self._is_interrupted or (has_beaten and not is_interrupted):
            self._held_s, self._has_asked, self._times, self._is_interrupted = 0.0, False, {}, is_interrupted
            return None
        before, self._times = self._times, _thread_times(self._pid)
        used = {thread: seconds - before.get(thread, seconds) for thread, seconds in self._times.items()}
        self._thread = self._pid if is_interrupted else max(used, key=lambda thread: used[thread], default=self._pid)
        if has_beaten or used.get(self._thread, 0.0) > 0:  # otherwise the process is stopped
            self._held_s += passed
        if self._held_s < BLOCKED_AFTER_S:
            return None
        if not self._has_asked:
            self._has_asked = True
            os.ftruncate(self._file, _STATE.size)
            self._send(_WRITE_STACK)
            return None
        frames = _frames(os.pread(self._file, 1 << 20, _STATE.size).decode(errors="replace"))
        if not frames:
            return None
        own_s = main_s if self._thread == self._pid else threads_s or main_s
        limit_s = env_limit_s if kind_of(frames) == "environment" else own_s or math.inf
        late_s = self._held_s if is_interrupted else self._held_s - limit_s
        if (where := innermost(frames)) is None:
            where = f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}"
        else:  # not while titan_rl saves something
            late_s = max(late_s, min(self._held_s, stopped_s) - STOP_S)
        return HeldInterpreter(where, self._held_s, limit_s, late_s, is_interrupted, advice.decode(errors="ignore"))

    def interrupt(self) -> None:
        """Interrupt the call, if it is in the main thread of a process that can be interrupted."""
        if self._is_interruptible and self._thread == self._pid:
            self._send(_INTERRUPT)

    def _send(self, number: int) -> None:
        ctypes.CDLL(None).tgkill(self._pid, self._thread, number)

    def close(self) -> None:
        os.close(self._file)


def _thread_times(pid: int) -> dict[int, float]:
    """Processor time of each thread of a process, in seconds."""
    times: dict[int, float] = {}
    for thread in Path(f"/proc/{pid}/task").glob("*/stat"):
        try:
            fields = thread.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        times[int(thread.parent.name)] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return times


def _frames(dump: str) -> list[traceback.FrameSummary]:
    """Stack of the thread that wrote a dump of faulthandler, outermost frame first."""
    _, _, current = dump.partition("Current thread")
    lines = re.findall(r'^  File "(.*)", line (\d+) in (.*)$', current.partition("\n\n")[0], re.MULTILINE)
    return of_callback([traceback.FrameSummary(file, int(line), name) for file, line, name in reversed(lines)])

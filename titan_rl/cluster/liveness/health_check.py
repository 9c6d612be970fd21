"""Health checks of a host's processes: pings over a local socket, progress of their work, processor time, and hang
detection."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

from titan_rl.cluster.liveness.local_processes import (
    CAN_WATCH,
    EndObserver,
    TreeUse,
    WatchedProcess,
    is_stopped,
    use_of,
    used_cpu_between,
)
from titan_rl.cluster.liveness.loop_thread import LoopThread, call_in
from titan_rl.core.calls.pulse import PULSE, PulseReader
from titan_rl.core.clock import CLOCK, Clock


@dataclass(frozen=True, slots=True)
class ProcessorTime:
    """Processor time of processes, in seconds.

    Args:
        total_s: Time of all threads, and of child processes that have ended.
        work_s: Part of it spent in `WorkProgress.in_progress`.
    """

    total_s: float = 0.0
    work_s: float = 0.0

    def __add__(self, other: ProcessorTime) -> ProcessorTime:
        return ProcessorTime(self.total_s + other.total_s, self.work_s + other.work_s)

    def __sub__(self, other: ProcessorTime) -> ProcessorTime:
        return ProcessorTime(self.total_s - other.total_s, self.work_s - other.work_s)


def own_processor_s() -> float:
    """Processor time so far of this process and of its children that have ended, in seconds."""
    return sum(os.times()[:4])


@dataclass(frozen=True, slots=True)
class ProcessHealth:
    """Health of one process: the time without a sign of life in seconds, and its processor time.

    Args:
        silent_s: Time since it last answered or computed.
        still_s: Time since its work last progressed or it computed; None while it has no work.
        stopped_s: Time for which it has been stopped by a signal, such as SIGSTOP; 0 if it is not stopped.
        processor_s, work_s: Its `ProcessorTime` when it last answered.
        held: Description of a call that holds the GIL, see `PulseReader`; "" if there is none.
        is_lost: Whether that call could not be interrupted in time.
    """

    silent_s: float = 0.0
    still_s: float | None = None
    stopped_s: float = 0.0
    processor_s: float = 0.0
    work_s: float = 0.0
    held: str = ""
    is_lost: bool = False


HEALTHY = ProcessHealth()

STOPPED_LIMIT_S = 3.0
"""Longest time that a process may be stopped by a signal, in seconds. A busy or waiting process is never in that state,
so the limit is much shorter than the one for silence."""


class HealthTracker:
    """Measures the time without a sign of life of one process.

    Answering a ping is a sign of life, and so is computing: a native call that holds the GIL (loading a model,
    compiling, capturing graphs) prevents all threads from answering, but is not a hang. A stopped or deadlocked process
    does neither. Work progresses if the process says so or computes: a thread may answer although a collective is
    stuck.

    Each interval between two calls of `look` counts for at most `longest_look_s`, because if the observer itself was
    stopped or starved, the process may have been, too.

    Example, with calls a second apart:

        health = HealthTracker(longest_look_s=2.0)
        health.look(1.0, computed=False)  # ProcessHealth(silent_s=1.0, still_s=None, stopped_s=0.0)
        health.answered(moves=7, at_work=True)
        health.look(2.0, computed=False)  # ProcessHealth(silent_s=0.0, still_s=0.0, stopped_s=0.0)
    """

    def __init__(self, longest_look_s: float, now: float = 0.0) -> None:
        self._longest_look_s = longest_look_s
        self._looked_at = now
        self._has_answered = False  # since the previous look
        self._moved = False
        self._moves: int | None = None
        self._at_work = False
        self._silent_s = self._still_s = self._stopped_s = 0.0
        self._processor = ProcessorTime()

    def answered(self, moves: int, *, at_work: bool, processor: ProcessorTime = ProcessorTime()) -> None:
        """Record an answer to a ping.

        Args:
            moves: Count of its progress so far.
            at_work: Whether it has work.
            processor: Its processor time so far.
        """
        self._has_answered = True
        self._processor = processor
        self._moved = self._moved or moves != self._moves
        self._moves, self._at_work = moves, at_work

    def look(self, now: float, *, computed: bool, stopped: bool = False) -> ProcessHealth:
        """Return the health of the process now.

        Args:
            computed: Whether the process or a descendant has used a processor or a disk since the last call.
            stopped: Whether a signal has stopped it, according to the kernel.
        """
        passed = min(now - self._looked_at, self._longest_look_s)
        self._looked_at = now
        self._silent_s = 0.0 if self._has_answered or computed else self._silent_s + passed
        self._still_s = 0.0 if self._moved or computed or not self._at_work else self._still_s + passed
        self._stopped_s = self._stopped_s + passed if stopped else 0.0
        self._has_answered = self._moved = False
        return ProcessHealth(
            self._silent_s,
            self._still_s if self._at_work else None,
            self._stopped_s,
            self._processor.total_s,
            self._processor.work_s,
        )

    @property
    def is_quiet(self) -> bool:
        """Whether it has given no sign of life since the previous `look`, so that its CPU use must be measured."""
        return not self._has_answered or (self._at_work and not self._moved)


def hang_reason(health: Iterable[ProcessHealth], limit_s: float) -> str | None:
    """Reason why a group of processes that depend on each other hangs; None if it does not.

    One process that is stopped or silent is enough. One without progress may wait for another that does progress, so
    all processes that have work must be without progress.
    """
    each = list(health)
    if (lost := next((one.held for one in each if one.is_lost), None)) is not None:
        return f"{lost}, for longer than its time limit"
    if any(one.stopped_s >= STOPPED_LIMIT_S for one in each):
        return f"it has been stopped by a signal for {STOPPED_LIMIT_S:g} s"
    if any(one.silent_s >= limit_s for one in each):
        return f"it hangs: it has neither answered nor computed for {limit_s:g} s"
    at_work = [one.still_s for one in each if one.still_s is not None]
    if at_work and min(at_work) >= limit_s:
        return f"it hangs: its work has made no progress for {limit_s:g} s"
    return None


PING = b"?"
HELLO = struct.Struct("=Q")  # the pid
ANSWER = struct.Struct("=Q?ddi")  # progress so far, whether there is work, processor time, pulse


class WorkProgress:
    """Progress of the work of one thread, which health checks read from any thread.

    Args:
        all_threads: Whether the processor time of the work is that of all threads of the process, and not only that of
            its own thread.
    """

    def __init__(self, *, all_threads: bool = True) -> None:
        self._processor_clock = time.process_time if all_threads else time.thread_time
        self._moves = 0
        self._num_in_progress = 0
        self._processor_s = 0.0

    @contextmanager
    def in_progress(self) -> Generator[None]:
        """Context manager: mark the block as work, which must progress. Its begin and its end count as progress."""
        self._num_in_progress += 1
        self._moves += 1
        began = self._processor_clock()
        try:
            yield
        finally:
            self._processor_s += self._processor_clock() - began
            self._num_in_progress -= 1
            self._moves += 1

    @property
    def answer(self) -> bytes:
        """Answer to a ping."""
        pulse = -1 if PULSE.descriptor is None else PULSE.descriptor
        return ANSWER.pack(self._moves % 2**64, self._num_in_progress > 0, own_processor_s(), self._processor_s, pulse)


def answer_pings(path: Path, work: WorkProgress) -> None:
    """Answer pings of the health checks that listen at a socket of this host. A thread answers for the rest of this
    process's life. The process exits once nobody listens there, because it would otherwise be orphaned.

    Raises:
        OSError: Nobody listens at the socket.
    """
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(str(path))
    connection.sendall(HELLO.pack(os.getpid()))
    threading.Thread(target=_answer, args=(connection, work), name="ping-answers", daemon=True).start()


def _answer(connection: socket.socket, work: WorkProgress) -> None:
    with connection, suppress(OSError):
        while connection.recv(1):
            connection.sendall(work.answer)
    os._exit(1)


class ProcessObserver(EndObserver, Protocol):
    """Receiver of the end and the health of one process, in the event loop in which the watch began."""

    def checked(self, health: ProcessHealth) -> None:
        """Handle a health check of the process. Called from time to time, at least while it gives no sign of life."""
        ...


class Watcher(Protocol):
    """Reports the ends and the health of processes of one host."""

    def watch(self, pid: int, observer: ProcessObserver) -> None:
        """Watch a process, if the kernel can report its end. Otherwise only Monarch notices that.

        Raises:
            ProcessLookupError: There is no such process.
        """
        ...

    def kill(self, pid: int) -> None:
        """Kill a process that is watched."""
        ...

    def forget(self, pid: int) -> None:
        """Stop watching a process: from now on an exit is intentional."""
        ...


LOOK_S = 1.0
LONGEST_CHECK_S = 2 * LOOK_S


class ProcessesOwner(Protocol):
    """Receiver of the ends of all processes that are checked."""

    def process_ended(self, pid: int, how: str) -> None: ...


class HealthChecks:
    """Health checks of the processes that connect to a socket with `answer_pings`. Belongs to the event loop that runs
    it.

    Args:
        path: Path of the socket. The permissions of its folder decide who may connect.
        owner: Called with the pid of each process that ended, and a description of its end.
    """

    def __init__(self, path: Path, owner: ProcessesOwner | None = None, clock: Clock = CLOCK) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(path))
        self._socket.listen()  # connections wait from now on instead of being refused
        self._owner = owner
        self.clock = clock
        self._processes: dict[int, _CheckedProcess] = {}  # by pid
        self._answering: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Serve until cancelled."""
        try:
            async with await asyncio.start_unix_server(self._follow, sock=self._socket) as server:
                await server.serve_forever()
        finally:
            for task in self._answering:
                task.cancel()
            for process in self._processes.values():
                process.close()

    def look(self) -> dict[int, ProcessHealth]:
        """Return the health of each process by pid, and ping them again. Called every `LOOK_S` seconds."""
        return {pid: process.look() for pid, process in self._processes.items()}

    def kill(self, pid: int) -> None:
        """Kill a process if it is watched. Otherwise its pid may belong to another process."""
        if (process := self._processes.get(pid)) is not None:
            process.watched.kill()

    def kill_all(self) -> None:
        for process in self._processes.values():
            process.watched.kill()

    async def _follow(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._answering.add(task)
        try:
            (pid,) = HELLO.unpack(await reader.readexactly(HELLO.size))
            try:
                process = _CheckedProcess(pid, writer, self)
            except ProcessLookupError:
                self.note_end(pid, f"process {pid} ended")
                return
            self._processes[pid] = process
            while True:
                process.answered(await reader.readexactly(ANSWER.size))
        except (asyncio.IncompleteReadError, OSError):  # the process ends, which the kernel reports
            pass
        except asyncio.CancelledError:
            pass  # asyncio would log a cancelled handler as a failure
        finally:
            self._answering.discard(task)
            writer.close()

    def note_end(self, pid: int, how: str) -> None:
        self._processes.pop(pid, None)
        if self._owner is not None:
            self._owner.process_ended(pid, how)


class _CheckedProcess:
    """Health of one process, and its connection."""

    def __init__(self, pid: int, writer: asyncio.StreamWriter, checks: HealthChecks) -> None:
        self.watched = WatchedProcess(pid, self)
        self._writer = writer
        self._checks = checks
        self._clock = checks.clock
        self._health = HealthTracker(LONGEST_CHECK_S, self._clock.now())
        self._looked_at = self._clock.now()
        self._used: TreeUse | None = None  # at the last look if it was quiet then
        self._pulse: PulseReader | None = None
        self._ping_pending = False
        self._ping()

    def ended(self, how: str) -> None:
        self.close()
        self._checks.note_end(self.watched.pid, how)

    def close(self) -> None:
        self.watched.close()
        if self._pulse is not None:
            self._pulse.close()
            self._pulse = None

    def answered(self, answer: bytes) -> None:
        self._ping_pending = False
        moves, at_work, total_s, work_s, pulse = ANSWER.unpack(answer)
        if pulse >= 0 and self._pulse is None:
            with contextlib.suppress(OSError):  # the process has ended
                self._pulse = PulseReader(self.watched.pid, pulse, LONGEST_CHECK_S)
        self._health.answered(moves, at_work=at_work, processor=ProcessorTime(total_s, work_s))

    def look(self) -> ProcessHealth:
        now, before = self._clock.now(), self._used
        self._used = use_of(self.watched.pid) if self._health.is_quiet else None
        computed = (
            before is not None
            and self._used is not None
            and used_cpu_between(before, self._used, now - self._looked_at)
        )
        self._looked_at = now
        self._ping()
        health = self._health.look(now, computed=computed, stopped=is_stopped(self.watched.pid))
        if self._pulse is None or (held := self._pulse.look(now)) is None:
            return health
        if held.is_late:
            self._pulse.interrupt()
        return replace(health, held=str(held), is_lost=held.is_lost)

    def _ping(self) -> None:
        if not self._ping_pending:
            with contextlib.suppress(OSError, RuntimeError):  # the process has ended
                self._writer.write(PING)
                self._ping_pending = True


class LocalHealthChecks:
    """`Watcher` of the processes of this host. The kernel reports their ends. Within its block as a context manager, a
    thread also pings them, even while the event loop in which it was entered is blocked.

    Attributes:
        path: Path of the socket for `answer_pings`; None if the kernel does not report the ends of processes.
    """

    def __init__(self) -> None:
        self.path: Path | None = None
        self._watched: dict[int, tuple[WatchedProcess, ProcessObserver]] = {}  # by pid
        self._opened = contextlib.ExitStack()

    def __enter__(self) -> LocalHealthChecks:
        if not CAN_WATCH:
            return self
        self._loop = asyncio.get_running_loop()
        with contextlib.ExitStack() as opened:
            self.path = Path(opened.enter_context(TemporaryDirectory(prefix="pings"))) / "s"
            self._checks = HealthChecks(self.path)
            opened.enter_context(LoopThread("health-checks", self._run()))
            self._opened = opened.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def watch(self, pid: int, observer: ProcessObserver) -> None:
        if CAN_WATCH:
            self._watched[pid] = WatchedProcess(pid, observer), observer

    def kill(self, pid: int) -> None:
        if pid in self._watched:
            self._watched[pid][0].kill()

    def forget(self, pid: int) -> None:
        if pid in self._watched:
            self._watched.pop(pid)[0].close()

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._checks.run())
            while True:
                await asyncio.sleep(LOOK_S)
                if health := self._checks.look():
                    call_in(self._loop, self._report, health)

    def _report(self, health: dict[int, ProcessHealth]) -> None:
        for pid, of_one in health.items():
            if pid in self._watched:
                self._watched[pid][1].checked(of_one)

"""Health checks of a host's processes: pings over a local socket, progress of their work, and hang detection."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

from titan_rl.cluster.liveness.local_processes import (
    CAN_WATCH,
    TreeUse,
    WatchedProcess,
    computed_between,
    is_stopped,
    use_of,
)
from titan_rl.cluster.liveness.loop_thread import LoopThread


@dataclass(frozen=True, slots=True)
class Signs:
    """Health of one process: for how long it has given no sign of life, in seconds.

    Args:
        silent_s: it has neither answered nor computed.
        still_s: its work has not got on, nor has it computed; None where it is at nothing.
        stopped_s: it has been stopped by a signal, as SIGSTOP.
    """

    silent_s: float = 0.0
    still_s: float | None = None
    stopped_s: float = 0.0


STOPPED_LIMIT_S = 3.0
"""Longest that a process may be stopped by a signal. What is busy, or waits, is never in that state, so that the limit
is much shorter than that of silence."""


class VitalSigns:
    """Adds up for how long a process gives no sign of life.

    An answer is one, and so is computing: a native call that holds Python's lock (loading a model, compiling,
    capturing graphs) lets no thread answer, and is no hang. A stopped or deadlocked process does neither. What it is
    at gets on where it says so, or where it computes: a thread that answers tells nothing of a collective that is
    stuck.

    Time counts by looks, each of them for `longest_look_s` at most: when the looker itself was stopped or starved, so
    may have been what it looks at.

    Example, with looks a second apart:

        signs = VitalSigns(longest_look_s=2.0)
        signs.look(1.0, computed=False)  # Signs(silent_s=1.0, still_s=None, stopped_s=0.0)
        signs.answered(moves=7, at_work=True)
        signs.look(2.0, computed=False)  # Signs(silent_s=0.0, still_s=0.0, stopped_s=0.0)
    """

    def __init__(self, longest_look_s: float, now: float = 0.0) -> None:
        self._longest_look_s = longest_look_s
        self._looked_at = now
        self._heard = False  # since the last look
        self._moved = False
        self._moves: int | None = None
        self._at_work = False
        self._silent_s = self._still_s = self._stopped_s = 0.0

    def answered(self, moves: int, *, at_work: bool) -> None:
        """It says how often it has got on so far, and whether it is at something."""
        self._heard = True
        self._moved = self._moved or moves != self._moves
        self._moves, self._at_work = moves, at_work

    def look(self, now: float, *, computed: bool, stopped: bool = False) -> Signs:
        """The health of the process now.

        Args:
            computed: it, or a process of its own, has used a processor or a disk since the last look.
            stopped: the kernel says that a signal has stopped it.
        """
        passed = min(now - self._looked_at, self._longest_look_s)
        self._looked_at = now
        self._silent_s = 0.0 if self._heard or computed else self._silent_s + passed
        self._still_s = 0.0 if self._moved or computed or not self._at_work else self._still_s + passed
        self._stopped_s = self._stopped_s + passed if stopped else 0.0
        self._heard = self._moved = False
        return Signs(self._silent_s, self._still_s if self._at_work else None, self._stopped_s)

    @property
    def is_quiet(self) -> bool:
        """Whether it has given no sign since the last look, so that it matters what it computes."""
        return not self._heard or (self._at_work and not self._moved)


def hang(signs: Iterable[Signs], limit_s: float) -> str | None:
    """Why processes that are of no use without each other hang; None where they do not.

    One of them that is stopped, or gives no sign of life, is enough. One that does not get on may wait for another that
    does, so all that are at something have to stand still.
    """
    each = list(signs)
    if any(one.stopped_s >= STOPPED_LIMIT_S for one in each):
        return f"it has been stopped by a signal for {STOPPED_LIMIT_S:g} s"
    if any(one.silent_s >= limit_s for one in each):
        return f"it hangs: it has neither answered nor computed for {limit_s:g} s"
    at_work = [one.still_s for one in each if one.still_s is not None]
    if at_work and min(at_work) >= limit_s:
        return f"it hangs: what it is at has not got on for {limit_s:g} s"
    return None


PING = b"?"
HELLO = struct.Struct("=Q")  # the pid
ANSWER = struct.Struct("=Q?")  # moves so far, and whether something is being worked at


class Duty:
    """What the thread does that matters in a process: it begins something, gets on, and ends it. For one such thread;
    asked from any."""

    def __init__(self) -> None:
        self._moves = 0
        self._begun = 0

    @contextmanager
    def going_on(self) -> Generator[None]:
        """For the length of the block something is worked at, and has to get on. Each block is a move."""
        self._begun += 1
        self._moves += 1
        try:
            yield
        finally:
            self._begun -= 1
            self._moves += 1

    @property
    def answer(self) -> bytes:
        """What a ping is answered with."""
        return ANSWER.pack(self._moves % 2**64, self._begun > 0)


def begin_pulse(path: Path, duty: Duty) -> None:
    """Answer the pings of whoever listens at a socket of this host, for as long as this process lives. Once nobody
    listens there any more, this process ends: nobody would know of it.

    Raises:
        OSError: nobody listens there.
    """
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(str(path))
    connection.sendall(HELLO.pack(os.getpid()))
    threading.Thread(target=_answer, args=(connection, duty), name="pulse", daemon=True).start()


def _answer(connection: socket.socket, duty: Duty) -> None:
    with connection, suppress(OSError):
        while connection.recv(1):
            connection.sendall(duty.answer)
    os._exit(1)


OnEnd = Callable[[str], None]
OnSigns = Callable[[Signs], None]


class Watched(Protocol):
    """One process that is watched."""

    def kill(self) -> None: ...

    def close(self) -> None:
        """Watch no longer: whatever ends now was told to."""
        ...


class Watcher(Protocol):
    """Of the processes of one host."""

    def watch(self, pid: int, on_end: OnEnd, on_signs: OnSigns) -> Watched | None:
        """
        Args:
            on_end: told once, in the running event loop, how the process ended.
            on_signs: told there what signs of life it gives, now and then while it gives none.

        Returns:
            None where nobody can tell, and Monarch has to.

        Raises:
            ProcessLookupError: there is no such process.
        """
        ...


class KernelWatcher:
    """Of the processes of this host, of their ends alone."""

    def watch(self, pid: int, on_end: OnEnd, on_signs: OnSigns) -> Watched | None:
        return WatchedProcess(pid, on_end) if CAN_WATCH else None


LOOK_S = 1.0
LONGEST_LOOK_S = 2 * LOOK_S


class HostWatch:
    """Whoever begins a pulse at its socket is watched from then on. Belongs to the event loop that runs it.

    Args:
        path: of the socket, whose folder says who may connect.
        on_end: told of each process that ended, by its pid, and how.
        clock: in seconds; it stands still while the machine sleeps.
        use: what a process and its children have used so far.
    """

    def __init__(
        self,
        path: Path,
        on_end: Callable[[int, str], None],
        clock: Callable[[], float] = time.monotonic,
        use: Callable[[int], TreeUse] = use_of,
    ) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(path))
        self._socket.listen()  # from now on whoever connects is kept waiting, and not refused
        self._on_end = on_end
        self._clock = clock
        self._use = use
        self._processes: dict[int, _Pulse] = {}  # by pid
        self._answering: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Until it is cancelled."""
        try:
            async with await asyncio.start_unix_server(self._follow, sock=self._socket) as server:
                await server.serve_forever()
        finally:
            for task in self._answering:
                task.cancel()
            for process in self._processes.values():
                process.close()

    def look(self) -> dict[int, Signs]:
        """What is to be said of each process since the last look, by pid; and ping them again. Called every `LOOK_S`
        seconds."""
        return {pid: process.look() for pid, process in self._processes.items()}

    def kill(self, pid: int) -> None:
        """One that is not watched is let be: its pid may be another's."""
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
                watched = WatchedProcess(pid, lambda how: self._ended(pid, how))
            except ProcessLookupError:
                self._on_end(pid, f"process {pid} ended")
                return
            self._processes[pid] = process = _Pulse(watched, writer, self._clock, self._use)
            while True:
                process.answered(await reader.readexactly(ANSWER.size))
        except (asyncio.IncompleteReadError, OSError):  # it ends, which the kernel tells
            pass
        except asyncio.CancelledError:
            pass  # nobody watches any more; asyncio logs a handler that is cancelled as a failure
        finally:
            self._answering.discard(task)
            writer.close()

    def _ended(self, pid: int, how: str) -> None:
        del self._processes[pid]
        self._on_end(pid, how)


class _Pulse:
    """One process and what is known of it."""

    def __init__(
        self,
        watched: WatchedProcess,
        writer: asyncio.StreamWriter,
        clock: Callable[[], float],
        use: Callable[[int], TreeUse],
    ) -> None:
        self.watched = watched
        self._writer = writer
        self._clock = clock
        self._use = use
        self._signs = VitalSigns(LONGEST_LOOK_S, clock())
        self._looked_at = clock()
        self._used: TreeUse | None = None  # at the last look, where it was quiet then
        self._asked = False
        self._ask()

    def answered(self, answer: bytes) -> None:
        self._asked = False
        moves, at_work = ANSWER.unpack(answer)
        self._signs.answered(moves, at_work=at_work)

    def look(self) -> Signs:
        now, before = self._clock(), self._used
        self._used = self._use(self.watched.pid) if self._signs.is_quiet else None
        computed = (
            before is not None
            and self._used is not None
            and computed_between(before, self._used, now - self._looked_at)
        )
        self._looked_at = now
        self._ask()
        return self._signs.look(now, computed=computed, stopped=is_stopped(self.watched.pid))

    def close(self) -> None:
        self.watched.close()

    def _ask(self) -> None:
        if not self._asked:
            with contextlib.suppress(OSError, RuntimeError):  # it has gone
                self._writer.write(PING)
                self._asked = True


logger = logging.getLogger(__name__)


class LocalLookout:
    """The `Watcher` of this host's processes, as a context manager, entered in the event loop in which what it tells is
    told. The kernel tells there of their ends; a thread pings them, whatever that loop is at.

    Attributes:
        path: of the socket where they begin their pulse; None where the kernel tells nothing of processes.
    """

    def __init__(self) -> None:
        self.path: Path | None = None
        self._on_signs: dict[int, OnSigns] = {}  # by pid
        self._opened = contextlib.ExitStack()

    def __enter__(self) -> LocalLookout:
        if not CAN_WATCH:
            return self
        self._loop = asyncio.get_running_loop()
        with contextlib.ExitStack() as opened:
            self.path = Path(opened.enter_context(TemporaryDirectory(prefix="pulse"))) / "s"
            self._watch = HostWatch(self.path, lambda pid, how: None)
            failed = partial(logger.error, "the lookout ended: %r")
            opened.enter_context(LoopThread("lookout", self._run, failed))
            self._opened = opened.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def watch(self, pid: int, on_end: OnEnd, on_signs: OnSigns) -> Watched | None:
        if not CAN_WATCH:
            return None

        def ended(how: str) -> None:
            self._on_signs.pop(pid, None)
            on_end(how)

        watched = WatchedProcess(pid, ended)
        self._on_signs[pid] = on_signs
        return _LocalWatch(watched, lambda: self._on_signs.pop(pid, None))

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch.run())
            while True:
                await asyncio.sleep(LOOK_S)
                if signs := self._watch.look():
                    with contextlib.suppress(RuntimeError):  # the loop is closed
                        self._loop.call_soon_threadsafe(self._tell, signs)

    def _tell(self, signs: dict[int, Signs]) -> None:
        for pid, of_one in signs.items():
            if (on_signs := self._on_signs.get(pid)) is not None:
                on_signs(of_one)


class _LocalWatch:
    def __init__(self, watched: WatchedProcess, forget: Callable[[], object]) -> None:
        self._watched = watched
        self._forget = forget
        self.kill = watched.kill

    def close(self) -> None:
        self._forget()
        self._watched.close()

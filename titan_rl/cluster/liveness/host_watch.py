"""Watches the processes of one host: the kernel tells of their deaths, and pings of those that hang."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable
from pathlib import Path

from titan_rl.cluster.liveness.kernel_watch import WatchedProcess
from titan_rl.cluster.liveness.process_tree import TreeUse, computed_between, is_stopped, use_of
from titan_rl.cluster.liveness.pulse import ANSWER, HELLO, PING
from titan_rl.cluster.liveness.vital_signs import Signs, VitalSigns

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

"""Worker of `titan-rl worker`, which offers this machine to runs as a host, and cleans up after their processes."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading

from titan_rl.cluster.hosts.folders import (
    FOLDER,
    announce_leaving,
    clean_up_after_dead_runs,
    make_worker_folder,
    scratch_root,
)
from titan_rl.cluster.hosts.host_worker_server import WorkerServer
from titan_rl.cluster.liveness.local_processes import children_of, unreaped_children_of
from titan_rl.cluster.liveness.loop_thread import LoopThread
from titan_rl.config.hosts import OPEN, join_address, split_address
from titan_rl.core.calls.parsing import names_this_machine
from titan_rl.core.clock import CLOCK, Clock
from titan_rl.core.console import Console

LOOK_CHILDREN_S = 0.5
CLEAN_FOR_S = 10.0
"""Time after the end of a process in which its children may still hold its resources, in seconds."""
REAP_AFTER_S = 2.0
"""Time that Monarch is given to reap its own children, in seconds. It does so at once, or never."""


class ProcessReaper:
    """Reaper of this process's children and grandchildren, however they end: by a signal, by the kernel, or with a
    run's controller, which then cannot clean up itself.

    For some time after the end of a process, it also removes resources that belong to no run.
    """

    def __init__(self, clock: Clock = CLOCK) -> None:
        self._clock = clock
        self._looked_at = -LOOK_CHILDREN_S
        self._children: set[int] = set()
        self._cleans_until = -CLEAN_FOR_S
        self._unreaped: dict[int, float] = {}  # time at which each process id was first seen

    def look(self) -> None:
        """Reap ended children and clean up after them. Call this often: most calls do nothing, because looking for
        children means reading all threads of this process."""
        now = self._clock.now()
        if now - self._looked_at < LOOK_CHILDREN_S:
            return
        self._looked_at = now
        self._reap(now)
        own = children_of(os.getpid())
        before, self._children = self._children, {*own, *(each for child in own for each in children_of(child))}
        if before - self._children:
            self._cleans_until = now + CLEAN_FOR_S
        if now <= self._cleans_until:
            clean_up_after_dead_runs(scratch_root())

    def _reap(self, now: float) -> None:
        self._unreaped = {pid: self._unreaped.get(pid, now) for pid in unreaped_children_of(os.getpid())}
        for pid, since in self._unreaped.items():
            if now - since >= REAP_AFTER_S:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)


logger = logging.getLogger(__name__)

LOOK_S = 0.1


def run_worker(listen: str, console: Console, drain_s: float) -> None:
    """Accept runs, one after the other, until a signal arrives. SIGTERM announces that this machine is about to go
    away: the run is warned, and first finishes its work on this machine.

    Args:
        listen: HOST:PORT of an interface of this machine.
        drain_s: Time that a run has to finish its work, in seconds.

    Raises:
        ValueError: `listen` is not an address.
        OSError: This machine has no such address, or the port is taken.
    """
    host, port = split_address(listen)
    address = join_address(host, port)
    clean_up_after_dead_runs(scratch_root())
    if not names_this_machine(host):
        console.warning(f"warning: {address} is open to other machines: {OPEN}")
    terminated = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: terminated.set())
    with contextlib.ExitStack() as resources:
        resources.callback(signal.signal, signal.SIGTERM, before)
        resources.callback(clean_up_after_dead_runs, scratch_root())
        folder = make_worker_folder()
        resources.callback(folder.remove)
        os.environ[FOLDER] = str(folder.path)
        resources.callback(os.environ.pop, FOLDER, None)
        point = WorkerServer(listen_on(host, port), console)
        reaper = ProcessReaper()

        async def serve() -> None:
            try:
                await point.serve()
            except Exception:
                logger.exception("no further run is accepted")
                terminated.set()

        with LoopThread("worker-server", serve()):
            console.message(f"listening on {address}")
            _wait(terminated, reaper)
            if point.is_in_use:
                console.message(
                    f"SIGTERM: runs on this host have {drain_s:g} s to move their work; a second SIGTERM ends them "
                    "at once"
                )
                terminated.clear()
                announce_leaving(folder.path, "its worker got SIGTERM")
                _wait(terminated, reaper, drain_s, point)


def listen_on(host: str, port: int) -> socket.socket:
    """Open a socket that accepts connections.

    Raises:
        OSError: This machine has no such address, or the port is taken.
    """
    return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)


def _wait(
    event: threading.Event,
    reaper: ProcessReaper,
    limit_s: float = float("inf"),
    server: WorkerServer | None = None,
) -> None:
    """Wait for an event, or until the server is not in use. This polls, so that signals are handled meanwhile."""
    waited_s = 0.0
    while waited_s < limit_s and not event.wait(LOOK_S) and not (server is not None and not server.is_in_use):
        waited_s += LOOK_S
        reaper.look()

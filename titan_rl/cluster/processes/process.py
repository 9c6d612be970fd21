"""Actor process of a run: its log file, its signal handling, its health checks and its weight transport."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Protocol

from monarch.actor import concurrent_endpoint
from monarch.config import configure

from titan_rl.cluster.liveness.health_check import WorkProgress, answer_pings
from titan_rl.cluster.processes.actor_calls import AnsweringActor
from titan_rl.cluster.processes.garbage_collection import begin_returning_memory
from titan_rl.config.sections import StateDictConfig
from titan_rl.core.calls.recorded_code import import_recorded
from titan_rl.core.tracing import spans
from titan_rl.core.tracing.recorder import Tracing
from titan_rl.weights.transports.registry import TransportSpec, make_transport
from titan_rl.weights.types import StateDictTransport

LOOPBACK = "127.0.0.1"


class ProcessFiles(Protocol):
    """Folder and id shared by the processes of a run or a server."""

    @property
    def run_id(self) -> str:
        """Id that is part of the names of all shared resources."""
        ...

    @property
    def logs(self) -> Path:
        """Folder with a log of each process."""
        ...


class RunFiles(ProcessFiles, Protocol):
    """Files of a run that its processes use."""

    @property
    def path(self) -> Path:
        """Folder of the run."""
        ...

    @property
    def config(self) -> Path:
        """File of the resolved settings."""
        ...

    @property
    def models(self) -> Mapping[str, Mapping[str, str]]:
        """Identity of each model that the run reads, by setting; empty if unknown."""
        ...


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """Specification of one process.

    Args:
        name: Name of the process's group, unique among living groups.
        host: Name of the host on which it runs. Processes of one host share memory.
        address: Address by which other hosts reach it.
        logs: Folder of its log on its host.
        rank: Number of the process in the group.
        tracing: Settings of its trace, which has the name of its log; None records nothing.
        ping_socket: Socket on its host where it answers pings; None if there are no health checks.
        code: Source of the user's modules with which the run began; see `import_recorded`.
    """

    name: str
    host: str
    address: str
    logs: Path
    rank: int = 0
    tracing: Tracing | None = None
    ping_socket: Path | None = None
    code: Mapping[str, bytes] = field(default_factory=dict[str, bytes])

    @property
    def log(self) -> Path:
        """Log file of its output. For rank 0 it has the name of the group."""
        return self.logs / f"{self.name}{f'-rank{self.rank}' if self.rank else ''}.log"


class ProcessActor(AnsweringActor):
    """Base class of the actor of a process. Each process of a group has one.

    Attributes:
        work: Progress of its work, which health checks watch.
        fork_kind: Kind of the fork server for its process; None starts the process without one.

    Args:
        work: Defaults to work whose processor time is that of all threads.
    """

    fork_kind: ClassVar[str | None] = None

    def __init__(self, spec: ProcessSpec, work: WorkProgress | None = None) -> None:
        super().__init__()
        self._spec = spec
        self.work = work or WorkProgress()
        enter_actor_process(spec.log)
        import_recorded(spec.code)
        if spec.address != LOOPBACK:  # otherwise its ports would have the controller's address
            configure(default_transport=f"tcp://{spec.address}:0")
        if spec.ping_socket is not None:
            answer_pings(spec.ping_socket, self.work)
        begin_returning_memory()
        spans.begin_recording(spec.tracing, spec.log.stem, host=spec.host)

    @concurrent_endpoint
    async def pid(self) -> int:
        return os.getpid()


def enter_actor_process(log_path: str | Path) -> None:
    """Detach this process from the terminal: its output goes to a file, and Ctrl-C reaches only the controller, which
    then stops the process gracefully. The same holds for SIGTERM, which schedulers send to every process of a job. The
    kernel still ends the process when the controller dies. Files that the process writes are not accessible to users
    who may not access the log's folder, even if the worker was started with a wider umask."""
    os.setpgid(0, 0)
    _outlive_sigterm()
    os.umask(os.umask(0o077) | 0o077 & ~Path(log_path).parent.stat().st_mode)
    _point(1, log_path)
    _point(2, log_path)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs a line for each request to a judge or agent


def _outlive_sigterm() -> None:
    """Install a SIGTERM handler that does nothing. An ignored signal would be inherited by programs that an environment
    starts, and Python's own handlers can be set only in the main thread, which belongs to Monarch."""
    faulthandler.register(signal.SIGTERM, os.open(os.devnull, os.O_WRONLY), all_threads=False)
    os.register_at_fork(after_in_child=lambda: faulthandler.unregister(signal.SIGTERM))


def main_thread_loop() -> asyncio.AbstractEventLoop:
    """Event loop that runs in the main thread of this process. Monarch does not expose it, and only waits in it."""
    frame = sys._current_frames()[threading.main_thread().ident or 0]  # pyright: ignore[reportPrivateUsage]
    while frame.f_code is not asyncio.BaseEventLoop.run_forever.__code__:
        frame = frame.f_back
        assert frame is not None, "no event loop runs in the main thread"
    return frame.f_locals["self"]


@contextlib.contextmanager
def stderr_into(log_path: str | Path) -> Iterator[None]:
    """Context manager that redirects standard error of native code to a file."""
    saved = os.dup(2)
    _point(2, log_path)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)


def _point(descriptor: int, log_path: str | Path) -> None:
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)  # less the umask
    os.dup2(log, descriptor)
    os.close(log)


def policy_run_id(run_id: str, adapter: str) -> str:
    """Id in the names of an adapter's weights; the run's own id for the name ""."""
    return f"{run_id}-{adapter}" if adapter else run_id


def transport_of(process: ProcessSpec, run_id: str, statedict: StateDictConfig) -> StateDictTransport:
    """Open the weight transport of the settings for this process."""
    spec = TransportSpec(
        run_id,
        timeout_s=statedict.pull_timeout_s,
        rank=process.rank,
        host=process.host,
        address=process.address,
        anchor_interval=statedict.anchor_interval,
    )
    return make_transport(statedict.transport, spec)

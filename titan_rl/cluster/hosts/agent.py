"""Host agent: the run's process on each host. It reports the state of the host, creates folders and sends output."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from monarch.actor import concurrent_endpoint

from titan_rl.cluster.hosts.folders import (
    clean_up_after_dead_runs,
    leaving_file,
    make_scratch,
    remove_monarch_logs,
    scratch_root,
)
from titan_rl.cluster.hosts.preflight import Clocks, FactsRequest, HostFacts, collect_facts
from titan_rl.cluster.liveness.heartbeat import DISMISSED, HostWatchdog, WatchdogSettings
from titan_rl.cluster.liveness.loop_thread import LoopThread
from titan_rl.cluster.processes.actor_calls import AnsweringActor
from titan_rl.cluster.processes.process import enter_actor_process
from titan_rl.core.calls.threads import in_thread
from titan_rl.core.errors import DataError
from titan_rl.weights.shard_files import OwnedFolder

MOST_BYTES = 4 << 20  # of output that is sent at once

Received = Mapping[str, tuple[int, int]]
"""Content that the controller has, by file name below the run's folder: the inode of each file, and the number of
bytes."""


@dataclass(frozen=True, slots=True)
class Piece:
    """New content of a file, after the content that was sent before.

    Args:
        name: Name of the file below the run's folder.
        file: Inode of the file. It distinguishes a trace that grew too large from the shorter one that replaces it.
        begin: Number of bytes of the file before this piece; 0 if the file was replaced.
    """

    name: str
    file: int
    begin: int
    data: bytes


def new_pieces(folder: Path, received: Received, most_bytes: int = MOST_BYTES) -> list[Piece]:
    """Read new content of the logs and traces in the run's folder on this host. A file that cannot be read is left for
    later."""
    pieces: list[Piece] = []
    for path in sorted([*folder.glob("logs/*"), *folder.glob("trace/*.jsonl")]):
        name = str(path.relative_to(folder))
        with contextlib.suppress(OSError):
            piece = _piece_of(path, name, received.get(name, (0, 0)), most_bytes)
            if piece is not None:
                pieces.append(piece)
                most_bytes -= len(piece.data)
    return pieces


def _piece_of(path: Path, name: str, received: tuple[int, int], most_bytes: int) -> Piece | None:
    """Read the next piece of a file; None if there is nothing new or `most_bytes` is 0.

    Raises:
        OSError: The file is gone, or is not a regular file.
    """
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        known, begin = received
        if known != status.st_ino or begin > status.st_size:
            begin = 0
        if not most_bytes or begin == status.st_size:
            return None
        file.seek(begin)
        return Piece(name, status.st_ino, begin, file.read(most_bytes))


logger = logging.getLogger(__name__)

IP_S = 5.0  # longest wait for a list of the network's interfaces


@dataclass(frozen=True, slots=True)
class RunOnHost:
    """The run's folders on a host.

    Attributes:
        run_dir: The run's folder if the host sees it, otherwise a local substitute.
        scratch: Folder for temporary files.
        interface: Name of the network interface that has the host's address; None if unknown.
    """

    run_dir: Path
    scratch: Path
    interface: str | None


class HostAgent(AnsweringActor):
    """Agent of one host. On the controller's machine it is part of the controller's process; on other hosts it has its
    own process. If that dies, the next agent that starts there removes its folders."""

    def __init__(self) -> None:
        super().__init__()
        self._scratch: OwnedFolder | None = None

    @property
    def _folder(self) -> Path:
        assert self._scratch is not None, "`enter` is called first"
        return self._scratch.path

    @property
    def _copy(self) -> Path:
        """Folder that replaces the run's folder where the host does not see it, and that has the logs of this host."""
        return self._folder / "run"

    @concurrent_endpoint
    async def enter(self) -> None:
        """Set up an agent that has its own process. Called first."""
        clean_up_after_dead_runs(scratch_root())
        self._scratch = make_scratch()
        (self._copy / "logs").mkdir(parents=True)
        enter_actor_process(self._copy / "logs" / f"host-{socket.gethostname()}.log")

    @concurrent_endpoint
    async def look(self, question: FactsRequest) -> HostFacts:
        facts = await in_thread(collect_facts, question)
        logger.info("this host has %s", facts)
        return facts

    @concurrent_endpoint
    async def clocks(self) -> Clocks:
        return Clocks.now()

    @concurrent_endpoint
    async def prepare(self, run_dir: Path | None, files: Mapping[str, bytes], address: str) -> RunOnHost:
        """Create the folders of the run on this host.

        Args:
            run_dir: The run's own folder if the host sees it; None otherwise.
            files: Contents of the run's settings files by name, for the folder that replaces the run's folder.
        """
        temporary = self._folder / "tmp"
        temporary.mkdir()
        if run_dir is None:
            for name, data in files.items():
                (self._copy / name).write_bytes(data)
        return RunOnHost(run_dir or self._copy, temporary, await in_thread(_interface_of, address))

    @concurrent_endpoint
    async def start_watchdog(self, settings: WatchdogSettings) -> Path:
        """Start the watchdog. It reports to the controller, and ends the run's processes on this host if it cannot
        reach the controller.

        Returns:
            Path of the socket where processes answer pings.
        """
        path = self._folder / "pulse"
        watchdog = HostWatchdog(settings, path, leaving_file())
        LoopThread("watchdog", self._run_watchdog(watchdog)).__enter__()  # for the lifetime of the process
        return path

    async def _run_watchdog(self, watchdog: HostWatchdog) -> None:
        try:
            if (reason := await watchdog.run()) == DISMISSED:
                return
            logger.warning("the processes of this host are ended: %s", reason)
            self._give_back()
        except Exception:
            logger.exception("the watchdog failed")
        os._exit(1)  # all processes that it watched end with this one

    @concurrent_endpoint
    async def receive(self, number: int, name: str, data: bytes) -> Path:
        """Append a piece to a file of a folder that is copied to this host.

        Args:
            number: Number of the folder.
            name: Name of the file below the folder.

        Returns:
            Path of the folder on this host.
        """
        folder = self._folder / f"copy-{number}"
        path = folder / name
        if not path.resolve().is_relative_to(folder.resolve()):
            raise DataError(f"{name} is not below its folder")

        def write() -> None:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab") as file:
                file.write(data)

        await in_thread(write)
        return folder

    @concurrent_endpoint
    async def free_port(self) -> int:
        """Return a free port."""
        with socket.socket() as listener:
            listener.bind(("", 0))
            return listener.getsockname()[1]

    @concurrent_endpoint
    async def new_output(self, received: Received) -> list[Piece]:
        """Return new output, at most `MOST_BYTES`; see `new_pieces`."""
        return await in_thread(new_pieces, self._copy, received)

    @concurrent_endpoint
    async def clean_up(self) -> None:
        """Remove everything that the run has on this host."""
        self._give_back()

    def _give_back(self) -> None:
        if self._scratch is not None:
            remove_monarch_logs(self._scratch.path.name)
            self._scratch.remove()
            self._scratch = None
        clean_up_after_dead_runs(scratch_root())


def _interface_of(address: str) -> str | None:
    """Name of the interface with an IPv4 address; None if there is none."""
    if shutil.which("ip") is None:
        return None
    import subprocess

    try:
        found = subprocess.run(["ip", "-o", "addr"], capture_output=True, text=True, check=False, timeout=IP_S).stdout
    except subprocess.TimeoutExpired:
        return None
    return next((line.split()[1] for line in found.splitlines() if f" {address}/" in line), None)

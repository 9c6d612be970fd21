"""Worker server: accepts runs on a host. Each run gets a new Monarch process at a new address, because Monarch
identifies connections by address, and never reconnects to an address that it has lost."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_rl.cluster.hosts.folders import FOLDER, remove_monarch_logs
from titan_rl.cluster.hosts.monarch_host import READY
from titan_rl.cluster.liveness.heartbeat import BEAT_S, receive, send
from titan_rl.cluster.liveness.local_processes import CAN_LIST, children_of
from titan_rl.config.hosts import join_address
from titan_rl.core.console import LOG, Console
from titan_rl.core.plain_data import printable

logger = logging.getLogger(__name__)

HELLO_S = 5.0
START_S = 30.0
MEETING_S = 600.0
"""Longest time for a run to prepare the host, which includes copying folders, in seconds."""
LOOK_S = 0.1
LONGEST_NAME = 80
FAREWELL_S = 2.0
"""Time for Monarch to notify the run that the last process has ended, in seconds. Without it the run would wait for a
long time."""


@dataclass(frozen=True, slots=True)
class _Guest:
    """Run that uses, or waits for, this worker.

    Args:
        run: Unique id of the run.
        worker: Address by which the run knows this worker.
        name: Name of the run, for people.
    """

    run: str
    worker: str
    name: str


class WorkerServer:
    """Server of the worker's protocol: lines of JSON between a run and the worker.

        run       {"run": "5f0c", "name": "alphabet", "worker": "10.0.0.2:22222"}: a unique id, the name for people, and
                  the address by which the run knows the worker
        worker    {"id": "c81e", "monarch": ""}: repeated as a heartbeat
                  {"id": "c81e", "monarch": "", "busy": true}: another run is here, and has to end first
                  {"id": "c81e", "monarch": "tcp://10.0.0.2:40123"}: Monarch listens there for this run
                  {"id": "c81e", "known": "gpu-1:22222"}: the run is already here under another address

    The run closes the connection once its watchdog watches the host. The Monarch process then ends with the last of the
    run's processes, or when the run connects again, which it does after it has lost the host, perhaps unnoticed by the
    host. A client that names no run receives only the id.

    Args:
        listener: Socket that is bound to the worker's address.
        console: Shows the user which runs come and go.
    """

    def __init__(self, listener: socket.socket, console: Console = LOG) -> None:
        self._listener = listener
        self._console = console
        self._id = secrets.token_hex(8)
        self._runs: dict[asyncio.Task[None], _Guest] = {}  # in order of arrival

    @property
    def is_in_use(self) -> bool:
        """Whether a run uses this worker. Thread-safe."""
        return bool(self._runs)

    async def serve(self) -> None:
        """Serve until cancelled. All processes of runs on this host then end."""
        try:
            async with await asyncio.start_server(self._answer, sock=self._listener) as server:
                await server.serve_forever()
        finally:
            for run in self._runs:
                run.cancel()
            await asyncio.gather(*self._runs, return_exceptions=True)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(HELLO_S):
                hello = await receive(reader)
            name = printable(str(hello.get("name", "")))[:LONGEST_NAME]
            guest = _Guest(str(hello.get("run", "")), str(hello.get("worker", "")), name)
            own_runs = {run: other for run, other in self._runs.items() if other.run == guest.run}
            known = next((other.worker for other in own_runs.values() if other.worker != guest.worker), None)
            if not guest.run or known is not None:
                send(writer, {"id": self._id} | ({} if known is None else {"known": known}))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(HELLO_S):
                        await reader.read(1)  # until the run has read the answer
                return
            others = [run for run in self._runs if run not in own_runs]
            run = asyncio.ensure_future(self._take(guest, [*own_runs], others, reader, writer))
            self._runs[run] = guest
            run.add_done_callback(self._runs.pop)
            with contextlib.suppress(asyncio.CancelledError):
                await run
        except OSError as error:
            logger.info("a connection ended: %r", error)
        finally:
            writer.close()

    async def _take(
        self,
        guest: _Guest,
        earlier: list[asyncio.Task[None]],
        others: list[asyncio.Task[None]],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        """Serve one run until its last process on this host has ended.

        Args:
            earlier: Earlier connections of the same run, which are ended.
            others: Other runs that came before, and have to end first.
        """
        state: dict[str, Any] = {"id": self._id, "monarch": ""}
        if others:
            state["busy"] = True
        beating = asyncio.ensure_future(_beat(writer, state))
        try:
            for run in earlier:
                run.cancel()
            await asyncio.gather(*earlier, return_exceptions=True)
            if others and not await _end_before(others, reader):
                return
            state.pop("busy", None)
            async with _monarch(writer.get_extra_info("sockname")[0]) as (process, address):
                state["monarch"] = address
                with self._announced(guest, writer.get_extra_info("peername")[0]):
                    with contextlib.suppress(TimeoutError, ConnectionError):
                        async with asyncio.timeout(MEETING_S):
                            while not beating.done() and await reader.read(1):
                                pass
                    beating.cancel()
                    writer.close()
                    await _end_of_children(process.pid)
        finally:
            beating.cancel()

    @contextlib.contextmanager
    def _announced(self, guest: _Guest, controller: str) -> Generator[None]:
        self._console.message(f"run {guest.name} has connected from {controller}")
        try:
            yield
        finally:
            self._console.message(f"run {guest.name} has ended")


async def _end_before(others: list[asyncio.Task[None]], reader: asyncio.StreamReader) -> bool:
    """Wait until other runs have ended. Returns False if the waiting run disconnects first."""
    gone = asyncio.ensure_future(reader.read(1))  # runs send nothing further
    try:
        waits: set[asyncio.Future[Any]] = {*others}
        while waits and not gone.done():
            done, _ = await asyncio.wait({*waits, gone}, return_when=asyncio.FIRST_COMPLETED)
            waits -= done
        return not gone.done()
    finally:
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)


async def _beat(writer: asyncio.StreamWriter, state: dict[str, Any]) -> None:
    while not writer.is_closing():
        send(writer, state)
        await asyncio.sleep(BEAT_S)


async def _end_of_children(pid: int) -> None:
    none_for_s = 0.0
    while none_for_s < FAREWELL_S:
        await asyncio.sleep(LOOK_S)
        none_for_s = 0.0 if children_of(pid) or not CAN_LIST else none_for_s + LOOK_S


@contextlib.contextmanager
def reserved_port(host: str) -> Generator[int]:
    """Context manager: a port of an address that the system gives to no other program, and at which one program can
    listen, if its socket has SO_REUSEADDR. Without this, another program might get the port before Monarch listens."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((host, 0))  # and it does not listen
        yield held.getsockname()[1]


@contextlib.asynccontextmanager
async def _monarch(host: str) -> AsyncGenerator[tuple[Process, str]]:
    """Context manager: start a Monarch process that ends with the block. Yields the process and its address."""
    # Monarch makes sockets in a folder that it never removes, and a log. Both are removed with the run.
    with (
        reserved_port(host) as port,
        tempfile.TemporaryDirectory(
            prefix="monarch-", dir=os.environ.get(FOLDER), ignore_cleanup_errors=True
        ) as temporary,
    ):
        address = f"tcp://{join_address(host, port)}"
        command = [sys.executable, "-m", "titan_rl.cluster.hosts.monarch_host", address]
        folder = Path(temporary)
        suffix = f"{folder.parent.name}-{folder.name}"  # cleanup after a dead worker matches on the first part
        environment = {**os.environ, "TMPDIR": temporary, "MONARCH_LOG_SUFFIX": suffix}
        process = await asyncio.create_subprocess_exec(
            *command, stdin=PIPE, stdout=PIPE, start_new_session=True, env=environment
        )
        try:
            assert process.stdout is not None
            async with asyncio.timeout(START_S):
                while (line := await process.stdout.readline()) != f"{READY}\n".encode():
                    if not line:
                        raise ConnectionError("Monarch did not start; see the worker's output for the reason")
            yield process, address
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            remove_monarch_logs(suffix)

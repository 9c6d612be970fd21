"""A checkpoint or model served beside a run, by a process of `titan-rl serve` that is restarted if it dies."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import secrets
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from titan_rl.core.calls.retries import Backoff
from titan_rl.core.errors import GenerationError

if TYPE_CHECKING:
    from titan_rl.tasks.agents.program import AgentProcesses

logger = logging.getLogger(__name__)

_LOOK_S = 0.1
_END_S = 10.0  # time for a server to shut down
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0  # pauses before restarts
_URL = re.compile(r"OPENAI_BASE_URL=(\S+?:(\d+))/v1\b")


@dataclass(frozen=True, slots=True)
class Served:
    """Address of a server, and the key that it requires."""

    url: str
    api_key: str


class PolicyServer:
    """Process of `titan-rl serve`. If it ends, another one is started at the same address.

    Args:
        folder: Folder of a run, a checkpoint, an export or a model.
        processes: Runs and kills the process.
        log: File for the output.
        options: Settings of the server.
        start_s: Longest time until the server listens.
    """

    def __init__(
        self, folder: str, processes: AgentProcesses, log: Path, options: Mapping[str, str], start_s: float
    ) -> None:
        self._folder = folder
        self._processes = processes
        self._log = log
        self._options = options
        self._start_s = start_s
        self._environment = {**os.environ, "TITAN_RL_API_KEY": secrets.token_urlsafe(32)}
        self._port = "0"  # the system chooses the port of the first process
        self.served: asyncio.Future[Served] = asyncio.get_running_loop().create_future()

    async def keep(self) -> None:
        """Run the server until this call is cancelled. `served` has its address, or the error of the first start."""
        backoff = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        while True:
            try:
                await self._run()
                error = GenerationError(f"the server of {self._folder} ended: {self._printed()[-500:]} ({self._log})")
            except (GenerationError, OSError) as failed:
                error = failed
            if not self.served.done():
                self.served.set_exception(error)
                return
            logger.warning("%s; it is restarted in %g s", error, backoff.next_s)
            await backoff.pause()

    async def _run(self) -> None:
        """Run one process until it ends.

        Raises:
            GenerationError: the process ended before it listened, or did not listen in time. The message has the end of
                its output.
        """
        command = [sys.executable, "-m", "titan_rl.cli.main", "serve", self._folder]
        for name, value in {**self._options, "server.port": self._port}.items():
            command += [f"--{name}", value]
        with self._log.open("wb") as output:
            async with self._processes.running(command, self._environment, output.fileno()) as server:
                try:
                    url, self._port = await self._address(server.process)
                    if not self.served.done():
                        self.served.set_result(Served(url, self._environment["TITAN_RL_API_KEY"]))
                    await server.ended
                finally:
                    with suppress(ProcessLookupError):
                        server.process.send_signal(signal.SIGTERM)
                    await asyncio.shield(asyncio.wait((server.ended,), timeout=_END_S))

    async def _address(self, process: subprocess.Popen[bytes]) -> tuple[str, str]:
        """URL and port of the server, which it prints once it listens."""
        try:
            async with asyncio.timeout(self._start_s):
                while (found := _URL.search(self._printed())) is None:
                    if process.poll() is not None:
                        raise GenerationError(
                            f"the server of {self._folder} ended: {self._printed()[-500:]} ({self._log})"
                        )
                    await asyncio.sleep(_LOOK_S)
        except TimeoutError:
            raise GenerationError(
                f"the server of {self._folder} did not answer within start_s = {self._start_s:g} s: "
                f"{self._printed()[-500:]} ({self._log})"
            ) from None
        return found[1], found[2]

    def _printed(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")


@asynccontextmanager
async def serving(
    folder: str,
    processes: AgentProcesses,
    log: Path,
    *,
    max_context: int,
    settings: Mapping[str, str],
    start_s: float,
    timeout_s: float,
) -> AsyncGenerator[Served]:
    """Context in which the policy of a folder is served. If the server dies it is restarted; requests fail until then.

    Args:
        folder: Folder of a run, a checkpoint, an export or a model.
        processes: Runs and kills the server's process.
        log: File for the server's output.
        max_context: Largest number of tokens of prompt and completion together.
        settings: Further settings of the server.
        start_s: Longest time until the server listens.
        timeout_s: Time limit of one answer.

    Raises:
        GenerationError: the server ended while it started, or did not listen in time. The message has the end of its
            output.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    options = {"server.request_s": f"{timeout_s}", "model.max_context": str(max_context), **settings}
    server = PolicyServer(folder, processes, log, options, start_s)
    keeping = asyncio.ensure_future(server.keep())
    try:
        await asyncio.wait((keeping, server.served), return_when=asyncio.FIRST_COMPLETED)
        if not server.served.done():
            keeping.result()  # raises the error
        yield await server.served
    finally:
        keeping.cancel()
        await asyncio.wait((keeping,))

"""A checkpoint or model served beside a run, by a process of `titan-rl serve`."""

from __future__ import annotations

import asyncio
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

from titan_rl.core.errors import GenerationError

if TYPE_CHECKING:
    from titan_rl.tasks.agents.program import AgentProcesses

_LOOK_S = 0.1
_END_S = 10.0  # for a server to shut down
_URL = re.compile(r"OPENAI_BASE_URL=(\S+?)/v1\b")


@dataclass(frozen=True, slots=True)
class Served:
    """Address of a server, and the key that it demands."""

    url: str
    api_key: str


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
    """Serve the policy of a folder for the length of the block.

    Args:
        folder: Of a run, a checkpoint, an export or a model.
        log: File for the server's output.
        settings: Further settings of the server.
        start_s: Longest time until it listens.
        timeout_s: Longest time of one answer.

    Raises:
        GenerationError: the server ended, or did not answer in time. Has the end of its output.
    """
    key = secrets.token_urlsafe(32)
    options = {"server.port": "0", "server.request_s": f"{timeout_s}", "model.max_context": str(max_context)}
    command = [sys.executable, "-m", "titan_rl.cli.main", "serve", folder]
    for name, value in {**options, **settings}.items():
        command += [f"--{name}", value]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        async with processes.running(command, {**os.environ, "TITAN_RL_API_KEY": key}, output.fileno()) as server:
            try:
                yield Served(await _url_of(server.process, log, folder, start_s), key)
            finally:
                with suppress(ProcessLookupError):
                    server.process.send_signal(signal.SIGTERM)
                await asyncio.shield(asyncio.wait((server.ended,), timeout=_END_S))


async def _url_of(process: subprocess.Popen[bytes], log: Path, folder: str, start_s: float) -> str:
    """URL of the server, which it prints once it listens."""
    try:
        async with asyncio.timeout(start_s):
            while (told := _URL.search(_printed(log))) is None:
                if process.poll() is not None:
                    raise GenerationError(f"the server of {folder} ended: {_printed(log)[-500:]} ({log})")
                await asyncio.sleep(_LOOK_S)
    except TimeoutError:
        raise GenerationError(
            f"the server of {folder} did not answer within start_s = {start_s:g} s: {_printed(log)[-500:]} ({log})"
        ) from None
    return told[1]


def _printed(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")

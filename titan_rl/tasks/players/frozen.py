"""A checkpoint that a server of its own answers for, as a player."""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from titan_rl.core.errors import GenerationError
from titan_rl.serving.client import HttpGenerateFn
from titan_rl.tasks.agents import reaper
from titan_rl.tasks.agents.processes import AgentProcesses
from titan_rl.tasks.players.settings import FrozenPolicy

_LOOK_S = 0.1
_END_S = 10.0  # that a server has to end in order
_URL = re.compile(r"OPENAI_BASE_URL=(\S+?)/v1\b")


@asynccontextmanager
async def serving(
    settings: FrozenPolicy, processes: AgentProcesses, log: Path, *, max_context: int
) -> AsyncGenerator[HttpGenerateFn]:
    """What the checkpoint generates, for the length of the block.

    Args:
        log: takes what the server prints.

    Raises:
        GenerationError: the server ended, or did not answer in time. Says what it printed last.
    """
    key = secrets.token_urlsafe(32)
    mark = processes.new_mark()
    options = {"server.port": "0", "server.request_s": f"{settings.timeout_s}", "model.max_context": str(max_context)}
    process = _start(_command(settings.policy, options | settings.settings), key, mark, log)
    try:
        url = await _url_of(process, log, settings)
        async with HttpGenerateFn(url, api_key=key, timeout_s=settings.timeout_s) as generate:
            yield generate
    finally:
        await asyncio.shield(_end(process, processes, mark))


def _command(policy: str, options: Mapping[str, str]) -> list[str]:
    given = [part for name, value in options.items() for part in (f"--{name}", value)]
    return [sys.executable, "-m", "titan_rl.cli.main", "serve", policy, *given]


def _start(command: Sequence[str], key: str, mark: str, log: Path) -> subprocess.Popen[bytes]:
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        return subprocess.Popen(
            command,
            env={**os.environ, "TITAN_RL_API_KEY": key, reaper.VARIABLE: mark},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C in the terminal is not for it
        )


async def _url_of(process: subprocess.Popen[bytes], log: Path, settings: FrozenPolicy) -> str:
    """Where it listens, which it prints once it does."""
    try:
        async with asyncio.timeout(settings.start_s):
            while (told := _URL.search(_printed(log))) is None:
                if process.poll() is not None:
                    raise GenerationError(f"the server of {settings.policy} ended: {_printed(log)[-500:]} ({log})")
                await asyncio.sleep(_LOOK_S)
    except TimeoutError:
        raise GenerationError(
            f"the server of {settings.policy} did not answer within start_s = {settings.start_s:g} s: "
            f"{_printed(log)[-500:]} ({log})"
        ) from None
    return told[1]


def _printed(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")


async def _end(process: subprocess.Popen[bytes], processes: AgentProcesses, mark: str) -> None:
    with suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    with suppress(TimeoutError):
        async with asyncio.timeout(_END_S):
            while process.poll() is None:  # noqa: ASYNC110  its exit code is for nobody else
                await asyncio.sleep(_LOOK_S)
    await processes.kill(mark)
    process.wait()

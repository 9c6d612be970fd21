"""Players that run while a task is open: models behind an endpoint, and served checkpoints."""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

from titan_rl.core.calls.imports import find_function
from titan_rl.core.calls.plain import plain_json
from titan_rl.core.errors import GenerationError
from titan_rl.rollout.environment.types import MessagePlayer, Player, TokenPlayer
from titan_rl.rollout.task import RunContext
from titan_rl.rollout.types import Message
from titan_rl.serving.client import HttpGenerateFn
from titan_rl.tasks.agents import reaper
from titan_rl.tasks.agents.processes import AgentProcesses, agent_processes
from titan_rl.tasks.players.settings import Endpoint, FrozenPolicy, PlayerSetting

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 10.0


class EndpointPlayer:
    """Player behind an endpoint of OpenAI's chat protocol. Transient failures, such as a full or unreachable server,
    are retried until the time is up.

    Args:
        transport: httpx transport for tests.
    """

    def __init__(self, settings: Endpoint, *, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self._settings = settings
        key = os.environ.get(settings.api_key)
        self._url = f"{settings.url.rstrip('/')}/chat/completions"
        self._client = httpx.AsyncClient(
            headers={} if key is None else {"authorization": f"Bearer {key}"},
            timeout=settings.timeout_s,
            transport=transport,
        )

    async def reply(self, messages: Sequence[Message]) -> Message:
        """Request an answer.

        Raises:
            GenerationError: the endpoint refuses the request, or its answer is not a message.
            TimeoutError: it has not answered in time.
        """
        asked = {"max_tokens": self._settings.max_tokens, "temperature": self._settings.temperature}
        body = {"model": self._settings.model, "messages": [plain_json(message) for message in messages]}
        body |= {name: value for name, value in asked.items() if value is not None}
        async with asyncio.timeout(self._settings.timeout_s):
            response = await self._post(body)
        try:
            said = response.json()["choices"][0]["message"]
            return {"role": "assistant", "content": str(said.get("content") or "")}
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise GenerationError(f"{self._url} answered with what is no message: {error!r}") from error

    async def close(self) -> None:
        await self._client.aclose()

    async def _post(self, body: dict[str, Any]) -> httpx.Response:
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                response = await self._client.post(self._url, json=body)
            except httpx.TransportError:
                response = None
            if response is not None and response.status_code == 200:
                return response
            if response is not None and response.status_code != 429 and response.status_code < 500:
                raise GenerationError(f"{self._url} answered {response.status_code}: {response.text[:200]}")
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


_LOOK_S = 0.1
_END_S = 10.0  # that a server has to end in order
_URL = re.compile(r"OPENAI_BASE_URL=(\S+?)/v1\b")


@asynccontextmanager
async def serving(
    settings: FrozenPolicy, processes: AgentProcesses, log: Path, *, max_context: int
) -> AsyncGenerator[HttpGenerateFn]:
    """Serve a checkpoint for the length of the block.

    Args:
        log: file for the server's output.

    Raises:
        GenerationError: the server ended, or did not answer in time. Has the end of its output.
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
    """URL of the server, which it prints once it listens."""
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


@asynccontextmanager
async def open_players(settings: Mapping[str, PlayerSetting], run: RunContext) -> AsyncGenerator[dict[str, Player]]:
    """Players of the seats, open for the length of the block. A checkpoint that plays several seats is served once.

    Raises:
        ConfigError: a script is missing.
        GenerationError: a checkpoint cannot be served.
    """
    async with AsyncExitStack() as stack:
        served: list[tuple[FrozenPolicy, Player]] = []
        players: dict[str, Player] = {}
        for seat, setting in settings.items():
            known: Player | None = next((player for of, player in served if of == setting), None)
            if known is not None:
                players[seat] = known
                continue
            players[seat] = await _open(seat, setting, run, stack)
            if isinstance(setting, FrozenPolicy):
                served.append((setting, players[seat]))
        yield players


async def _open(seat: str, setting: PlayerSetting, run: RunContext, stack: AsyncExitStack) -> Player:
    if isinstance(setting, Endpoint):
        endpoint = EndpointPlayer(setting)
        stack.push_async_callback(endpoint.close)
        return MessagePlayer(endpoint.reply, timeout_s=setting.timeout_s)
    if isinstance(setting, FrozenPolicy):
        log = run.folder / "logs" / f"player-{seat}-{socket.gethostname()}-{os.getpid()}.log"
        run.tell(f"seat {seat!r} is played by {setting.policy}, which is being served; log: {log}")
        processes = await stack.enter_async_context(agent_processes())
        generate = await stack.enter_async_context(serving(setting, processes, log, max_context=run.max_context))
        return TokenPlayer(generate, temperature=setting.temperature, timeout_s=setting.timeout_s)
    return "policy" if setting == "policy" else MessagePlayer(find_function(f"task.seats.{seat}", setting, {}))

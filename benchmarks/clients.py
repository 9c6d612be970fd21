"""Servers in separate processes, and clients in another process."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import time
import urllib.request
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

SESSIONS = 64
LENGTHS = range(32, 97)  # tokens of a completion, so that requests neither come nor end together
QUESTION = "Sort these names alphabetically by first name: LenaFischer MarcusVega AnnaPetrov"
START_S = 180.0


@dataclass(frozen=True)
class Load:
    """Load of clients on a server; each client sends one request after the other."""

    url: str
    requests: int  # per client
    stream: bool = False

    def body(self, rng: random.Random) -> dict[str, Any]:
        return {
            "model": "policy",
            "messages": [{"role": "user", "content": QUESTION}],
            "max_tokens": rng.choice(LENGTHS),
            "ignore_eos": True,
            "stream": self.stream,
        }


@dataclass(frozen=True)
class Measured:
    seconds: float
    latencies: Sequence[float]  # [clients * requests], in s


def ask(load: Load) -> Measured:
    """Send the requests of a load; runs in the process of the clients."""
    return asyncio.run(_ask(load))


async def _ask(load: Load) -> Measured:
    import aiohttp

    latencies: list[float] = []
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:

        async def session(number: int) -> None:
            rng = random.Random(number)
            for _ in range(load.requests):
                began = time.perf_counter()
                async with client.post(f"{load.url}/v1/chat/completions", json=load.body(rng)) as answer:
                    content = await answer.read()
                    assert answer.status == 200, content
                    assert not load.stream or content.endswith(b"data: [DONE]\n\n"), content[-200:]
                latencies.append(time.perf_counter() - began)

        began = time.perf_counter()
        await asyncio.gather(*(session(number) for number in range(SESSIONS)))
        return Measured(time.perf_counter() - began, latencies)


class Clients:
    """Process of the clients."""

    def __init__(self) -> None:
        self._pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"))

    async def __call__(self, load: Load) -> Measured:
        return await asyncio.get_running_loop().run_in_executor(self._pool, ask, load)

    def close(self) -> None:
        self._pool.shutdown()


@asynccontextmanager
async def server(command: Sequence[str], port: int, log: Path, **environment: str) -> AsyncGenerator[tuple[str, int]]:
    """Start a server in its own process, and yield its address and process id once it answers."""
    url, started_by = f"http://127.0.0.1:{port}", time.monotonic() + START_S
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *command, stdout=output, stderr=output, env={**os.environ, **environment}
        )
    try:
        while True:
            if process.returncode is not None or time.monotonic() > started_by:
                raise RuntimeError(f"{command} does not serve:\n{tail_of(log)}")
            with suppress(OSError):
                await asyncio.to_thread(urllib.request.urlopen, f"{url}/health", timeout=5)
                break
            await asyncio.sleep(0.2)
        yield url, process.pid
    finally:
        with suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


def tail_of(log: Path) -> str:
    return log.read_text()[-2000:]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]

"""OpenEnv server with two environments: a guessing game, and tools (MCP).

It prints the port of each, and serves until its input ends.
"""

import asyncio
import random
import socket
import sys
from typing import Any
from uuid import uuid4

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    guess: int


class Hint(Observation):
    hint: str
    open_sessions: int


class Guessing(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    open_sessions = 0

    def __init__(self) -> None:
        super().__init__()
        Guessing.open_sessions += 1
        self._state = State(episode_id=str(uuid4()))

    def reset(self, seed: int | None = None, largest: int = 8, **_: Any) -> Hint:
        self.number = random.Random(seed).randint(1, largest)
        return self._hint(f"between 1 and {largest}", 0.0, False)

    def step(self, action: Guess, timeout_s: float | None = None, **_: Any) -> Hint:
        self._state.step_count += 1
        if action.guess == 99:
            raise RuntimeError("the environment broke")
        if action.guess == self.number:
            return self._hint("right", 1.0, True)
        return self._hint("higher" if action.guess < self.number else "lower", -0.1, False)

    def _hint(self, hint: str, reward: float, done: bool) -> Hint:
        return Hint(hint=hint, open_sessions=Guessing.open_sessions, reward=reward, done=done)

    @property
    def state(self) -> State:
        return self._state

    def close(self) -> None:
        Guessing.open_sessions -= 1


class Echo(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        mcp = FastMCP("echo")

        @mcp.tool
        def echo(text: str, times: int = 1) -> str:
            """Say it again."""
            return text * times

        super().__init__(mcp)

    def reset(self, seed: int | None = None, **_: Any) -> Observation:
        return Observation(done=False, reward=0.0)

    def _step_impl(self, action: Action, timeout_s: float | None = None, **_: Any) -> Observation:
        raise AssertionError(f"not called with {action}")

    @property
    def state(self) -> State:
        return State()


async def main() -> None:
    apps = [
        create_fastapi_app(Guessing, Guess, Hint, max_concurrent_envs=3),
        create_fastapi_app(Echo, CallToolAction, CallToolObservation, max_concurrent_envs=3),
    ]
    servers, ports = [], []
    for app in apps:
        bound = socket.create_server(("127.0.0.1", 0))
        ports.append(bound.getsockname()[1])
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
        servers.append(asyncio.create_task(server.serve([bound])))
        while not server.started:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    print(*ports, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    for server in servers:
        server.cancel()


asyncio.run(main())

"""OpenEnv's wire protocol: JSON messages over a WebSocket, which is a session with an environment of its own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import urlsplit, urlunsplit

from titan_rl.core.calls.imports import require

MAX_MESSAGE_BYTES = 100 << 20
LAST_TRY_S = 2.0  # the longest pause between two tries to have a place on the server
CLOSE_S = 5.0


class OpenEnvError(ConnectionError):
    """A server of OpenEnv cannot be reached, does not answer in time, or answers with an error.

    Attributes:
        code: OpenEnv's own, such as "EXECUTION_ERROR"; empty where it gave none.
    """

    def __init__(self, text: str, code: str = "") -> None:
        super().__init__(text)
        self.code = code


@dataclass(frozen=True, slots=True)
class Observed:
    """What a reset or a step led to."""

    observation: dict[str, Any]
    reward: float | None
    done: bool


class Session:
    """One environment on a server, from `open` to `close`.

    Args:
        url: of the server: http, https, ws or wss.
        open_timeout_s: for the connection, and for a place on a server that is full.
        answer_timeout_s: for each answer.
    """

    def __init__(self, url: str, *, open_timeout_s: float, answer_timeout_s: float) -> None:
        self.url = socket_url(url)
        self._open_timeout_s = open_timeout_s
        self._answer_timeout_s = answer_timeout_s
        self._socket: Any = None

    async def open(self, **reset: Any) -> Observed:
        """Connect and begin an episode.

        Raises:
            OpenEnvError: it cannot be had in time.
        """
        deadline = asyncio.get_running_loop().time() + self._open_timeout_s
        pause_s = 0.05
        while True:
            try:
                await self._connect(deadline)
                return await self._observed({"type": "reset", "data": reset})
            except OpenEnvError as error:
                await self.close()
                if error.code != "CAPACITY_REACHED":
                    raise
                if asyncio.get_running_loop().time() + pause_s > deadline:
                    raise OpenEnvError(
                        f"{error}; have the server take more sessions (max_concurrent_envs), or set "
                        "scheduling.max_running_rollouts to what it takes",
                        error.code,
                    ) from None
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LAST_TRY_S)

    async def step(self, action: Mapping[str, Any]) -> Observed:
        """
        Raises:
            OpenEnvError: with code "VALIDATION_ERROR" where the environment takes no such action.
        """
        return await self._observed({"type": "step", "data": dict(action)})

    async def state(self) -> dict[str, Any]:
        return await self._ask({"type": "state"}, "state")

    async def close(self) -> None:
        socket, self._socket = self._socket, None
        if socket is None:
            return
        try:
            async with asyncio.timeout(CLOSE_S):
                await socket.send(json.dumps({"type": "close"}))
                await socket.wait_closed()  # by the server, once the environment is closed and its place free
        except Exception:  # it is gone already, which is as good
            socket.transport.abort()

    async def _connect(self, deadline: float) -> None:
        client = require("websockets.asyncio.client", "openenv")
        # Pings keep a connection alive through proxies while the policy writes; whether the server is alive, its
        # answers say: an environment that computes answers no pings.
        options = {"max_size": MAX_MESSAGE_BYTES, "ping_interval": 20.0, "ping_timeout": None}
        if urlsplit(self.url).hostname in ("localhost", "127.0.0.1", "::1"):
            options["proxy"] = None
        left_s = max(0.001, deadline - asyncio.get_running_loop().time())
        try:
            self._socket = await client.connect(self.url, open_timeout=left_s, **options)
        except Exception as error:
            raise OpenEnvError(f"{self.url} cannot be reached: {type(error).__name__}: {error}") from error

    async def _observed(self, message: Mapping[str, Any]) -> Observed:
        data = await self._ask(message, "observation")
        observation, reward = data.get("observation"), data.get("reward")
        if not isinstance(observation, dict):
            raise OpenEnvError(f"{self.url} gave an observation that is no table: {observation!r:.200}")
        given = None if reward is None else float(reward)
        return Observed(cast("dict[str, Any]", observation), given, bool(data.get("done")))

    async def _ask(self, message: Mapping[str, Any], wanted: str) -> dict[str, Any]:
        """The data of the answer to a message."""
        closed = require("websockets.exceptions", "openenv").ConnectionClosed
        try:
            async with asyncio.timeout(self._answer_timeout_s):
                with suppress(closed):  # a server that is full says so, and closes, before it is asked
                    await self._socket.send(json.dumps(message))
                answer: Any = json.loads(await self._socket.recv())
        except TimeoutError as error:
            raise OpenEnvError(
                f"{self.url} has not answered a {message['type']} in {self._answer_timeout_s:g} s"
            ) from error
        except Exception as error:
            raise OpenEnvError(
                f"the connection to {self.url} failed at a {message['type']}: {type(error).__name__}: {error}"
            ) from error
        whole = cast("dict[str, Any]", answer) if isinstance(answer, dict) else {}
        kind, data = whole.get("type"), whole.get("data")
        if not isinstance(data, dict) or kind not in ("error", wanted):
            raise OpenEnvError(f"{self.url} answered a {message['type']} with {answer!r:.200}")
        told = cast("dict[str, Any]", data)
        if kind == "error":
            about = told.get("errors") or told.get("message")
            raise OpenEnvError(f"{self.url} says of a {message['type']}: {about}", str(told.get("code", "")))
        return told


def socket_url(url: str) -> str:
    """
    >>> socket_url("https://host/env/")
    'wss://host/env/ws'

    Raises:
        ValueError: it is no address of a server.
    """
    scheme, host, path, query, _ = urlsplit(url)
    schemes = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}
    if scheme not in schemes or not host:
        raise ValueError(f"{url!r} is no server's address; give one such as http://localhost:8000")
    return urlunsplit((schemes[scheme], host, f"{path.rstrip('/')}/ws", query, ""))

"""Fake server of OpenEnv's protocol, with scripted answers and failures."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from websockets.asyncio.server import ServerConnection, serve

Answer = Callable[[dict[str, Any]], dict[str, Any] | str | None]


@dataclass
class Server:
    """Server that answers with the result of `answer`: a message, "hang" or "drop", or None to echo the action."""

    answer: Answer = lambda message: None
    places: int = 8
    url: str = ""
    heard: list[dict[str, Any]] = field(default_factory=list)
    most_open: int = 0
    _open: set[ServerConnection] = field(default_factory=set)

    @property
    def num_open(self) -> int:
        return len(self._open)

    async def talk(self, connection: ServerConnection) -> None:
        if len(self._open) == self.places:
            full = {"message": "all places are taken", "code": "CAPACITY_REACHED"}
            await connection.send(json.dumps({"type": "error", "data": full}))
            return
        self._open.add(connection)
        self.most_open = max(self.most_open, len(self._open))
        try:
            async for text in connection:
                message = json.loads(text)
                self.heard.append(message)
                if message["type"] == "close":
                    return
                answer = self.answer(message)
                if answer == "drop":
                    return
                if answer != "hang":
                    await connection.send(json.dumps(answer or observed(message.get("data", {}))))
        finally:
            self._open.discard(connection)


def observed(observation: dict[str, Any], *, reward: float | None = None, done: bool = False) -> dict[str, Any]:
    return {"type": "observation", "data": {"observation": observation, "reward": reward, "done": done}}


def error(code: str) -> dict[str, Any]:
    return {"type": "error", "data": {"message": f"it was {code}", "code": code}}


@asynccontextmanager
async def serving(answer: Answer = lambda message: None, **options: Any) -> AsyncIterator[Server]:
    server = Server(answer, **options)
    async with serve(server.talk, "127.0.0.1", 0) as listening:
        server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        yield server

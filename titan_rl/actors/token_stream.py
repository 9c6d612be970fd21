"""Tokens on their way from a generator's process to the router, ahead of the completion they belong to."""

from __future__ import annotations

import asyncio
from typing import Any

from monarch.actor import Channel, Port

from titan_rl.routing.replica import OnTokens
from titan_rl.types import Completion


class TokenOutlet:
    """The generator's end. What requests tell during one turn of the event loop travels as one message."""

    def __init__(self, port: Port[list[Completion]]) -> None:
        self._port = port
        self._parts: list[Completion] = []

    def __call__(self, part: Completion) -> None:
        if not self._parts:
            asyncio.get_running_loop().call_soon(self._send)
        self._parts.append(part)

    def _send(self) -> None:
        parts, self._parts = self._parts, []
        self._port.send(parts)


class TokenInlet:
    """The router's end. Parts of requests that nobody listens for are dropped."""

    def __init__(self) -> None:
        self.port: Port[list[Completion]]
        self._receiver: Any
        self.port, self._receiver = Channel[list[Completion]].open()
        self._listeners: dict[str, OnTokens] = {}

    def listen(self, request_id: str, on_tokens: OnTokens) -> None:
        self._listeners[request_id] = on_tokens

    def forget(self, request_id: str) -> None:
        self._listeners.pop(request_id, None)

    async def run(self) -> None:
        """Hand parts to their listeners, until cancelled."""
        while True:
            for part in await self._receiver.recv():
                if (on_tokens := self._listeners.get(part.request_id)) is not None:
                    on_tokens(part)

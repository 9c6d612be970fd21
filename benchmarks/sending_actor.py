"""An actor of another process, for what a message of Monarch's costs who receives it."""

from __future__ import annotations

import asyncio

from monarch.actor import Actor, Port, concurrent_endpoint


class Sender(Actor):
    @concurrent_endpoint
    async def send(self, port: Port[bytes], num_messages: int, num_bytes: int) -> None:
        payload = bytes(num_bytes)
        for number in range(num_messages):
            port.send(payload)
            if number % 100 == 99:
                await asyncio.sleep(0.01)

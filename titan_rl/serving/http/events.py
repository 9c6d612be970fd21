"""The events of a stream, on their way to whoever sends them."""

from __future__ import annotations

import asyncio

LIFE = b": waiting\n\n"
"""A comment, which clients skip."""


class Events:
    """What there is to send. One that sends waits in `next`, and is woken once for all that came in one turn of the
    event loop.

    Args:
        keep_alive_s: after so long without an event there is a sign of life.
    """

    def __init__(self, keep_alive_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._keep_alive_s = keep_alive_s
        self._events: list[bytes] = []
        self._wake: asyncio.Future[None] = self._loop.create_future()
        self._taken_at = self._loop.time()
        self._life = self._loop.call_later(keep_alive_s, self._show_life)

    def add(self, event: bytes) -> None:
        self._events.append(event)
        self.rouse()

    def rouse(self, _: object = None) -> None:
        """Have `next` return, also without events."""
        if not self._wake.done():
            self._wake.set_result(None)

    async def next(self) -> bytes:
        """What came since the last call, once there is something."""
        await self._wake
        self._wake, self._taken_at = self._loop.create_future(), self._loop.time()
        events, self._events = self._events, []
        return b"".join(events)

    def close(self) -> None:
        self._life.cancel()

    def _show_life(self) -> None:
        """One timer for the whole stream: it looks whether an event came meanwhile."""
        due_s = self._taken_at + self._keep_alive_s - self._loop.time()
        if due_s <= 0 and not self._events:
            self.add(LIFE)
        self._life = self._loop.call_later(due_s if due_s > 0 else self._keep_alive_s, self._show_life)

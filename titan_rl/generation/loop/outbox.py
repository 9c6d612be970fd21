"""Results on their way from the engine's thread to the event loops of those who wait for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any


class Outbox:
    """Results for the futures of several event loops, delivered with one wake-up for each loop."""

    def __init__(self) -> None:
        self._by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Any, Any]]] = {}

    def resolve(self, future: asyncio.Future[Any], value: Any) -> None:
        """`value` becomes the future's result, or its exception if it is one."""
        self._by_loop.setdefault(future.get_loop(), []).append((future, value))

    def call(self, loop: asyncio.AbstractEventLoop, function: Callable[[Any], None], value: Any) -> None:
        """`function(value)` runs on `loop`, in order with the results."""
        self._by_loop.setdefault(loop, []).append((function, value))

    def send(self) -> None:
        if not self._by_loop:
            return
        batches, self._by_loop = self._by_loop, {}
        for loop, batch in batches.items():
            try:
                loop.call_soon_threadsafe(_deliver, loop, batch)
            except RuntimeError:  # the loop is closed, so nobody awaits these any more
                assert loop.is_closed()


def _deliver(loop: asyncio.AbstractEventLoop, batch: list[tuple[Any, Any]]) -> None:
    for target, value in batch:
        if not isinstance(target, asyncio.Future):
            try:
                target(value)
            except Exception as error:
                loop.call_exception_handler({"message": f"{target!r} failed", "exception": error})
        elif target.done():  # its caller has been cancelled
            continue
        elif isinstance(value, BaseException):
            target.set_exception(value)
        else:
            target.set_result(value)

"""Background tasks of tests. Their errors end the test, which would otherwise wait forever."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

HANG_S = 300.0
"""Limit for waiting for another process or thread: long enough for a busy machine, so that only a hang reaches it."""


@asynccontextmanager
async def in_background(coroutine: Coroutine[Any, Any, Any]) -> AsyncGenerator[asyncio.Task[Any]]:
    """Run `coroutine` as a task during the block, then cancel it.

    Raises:
        Exception: The error of the task, as soon as it fails, interrupting the block.
    """
    task = asyncio.ensure_future(coroutine)
    test = asyncio.current_task()
    assert test is not None

    def interrupt(task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and task.exception() is not None:
            test.cancel()

    task.add_done_callback(interrupt)
    try:
        yield task
    finally:
        task.remove_done_callback(interrupt)
        if task.done() and not task.cancelled() and (error := task.exception()) is not None:
            test.uncancel()
            raise error
        task.cancel()

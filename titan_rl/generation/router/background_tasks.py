"""Background tasks with an owner: none outlives it, and none fails unseen."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine
from typing import Any

from titan_rl.core.calls.cancellation import asked_to_cancel
from titan_rl.core.errors import StrayCancellationError

logger = logging.getLogger(__name__)


async def cancel_and_drain(tasks: Collection[asyncio.Task[Any]], timeout_s: float) -> list[asyncio.Task[Any]]:
    """Cancel tasks and wait until they have ended, whatever they end with.

    Returns:
        Tasks still running after `timeout_s`; they are named in the log.
    """
    if not tasks:
        return []
    for task in tasks:
        task.cancel()
    _, left = await asyncio.wait(tasks, timeout=timeout_s)
    if left:
        logger.warning("gave up on %d tasks after %g s: %s", len(left), timeout_s, [task.get_name() for task in left])
    return list(left)


class BackgroundTasks:
    """Tasks that run until they are done or the set is closed. An exception in one goes to `on_error`."""

    def __init__(self, on_error: Callable[[BaseException], None]) -> None:
        self._on_error = on_error
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    def start(self, coroutine: Coroutine[Any, Any, None], name: str) -> None:
        """Run `coroutine`; after `close` it is dropped unstarted."""
        if self._closed:
            coroutine.close()
            return
        task = asyncio.get_running_loop().create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    async def close(self, timeout_s: float) -> None:
        self._closed = True
        await cancel_and_drain(tuple(self._tasks), timeout_s)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            if not asked_to_cancel(task):
                message = f"{task.get_name()!r} was cancelled, though nobody had asked for that"
                self._on_error(StrayCancellationError(message))
        elif (error := task.exception()) is not None:
            self._on_error(error)

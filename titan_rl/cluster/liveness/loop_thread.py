"""Event loop in its own thread, which runs while other loops are blocked."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Coroutine
from typing import Any

logger = logging.getLogger(__name__)


def call_in(loop: asyncio.AbstractEventLoop, function: Callable[..., object], *args: Any) -> None:
    """Call a function soon in an event loop of another thread. Does nothing if that loop is closed."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(function, *args)


class LoopThread:
    """Context manager that runs a coroutine in its own thread until the end of its block.

    Attributes:
        loop: Event loop of the thread, for `call_in`.

    Args:
        main: Coroutine that is awaited in the thread and cancelled at the end of the block. Its errors are logged.

    Raises:
        OSError: Raised on entry if no event loop can be made, for instance for lack of file descriptors.
    """

    def __init__(self, name: str, main: Coroutine[Any, Any, object]) -> None:
        self._main = main
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._started = threading.Event()
        self._error: BaseException | None = None  # error that kept `main` from starting
        self.loop: asyncio.AbstractEventLoop
        self._task: asyncio.Task[object]

    def __enter__(self) -> LoopThread:
        self._thread.start()
        self._started.wait()
        if self._error is not None:
            raise self._error
        return self

    def __exit__(self, *_: object) -> None:
        call_in(self.loop, self._task.cancel)
        self._thread.join()

    def _run(self) -> None:
        try:
            asyncio.run(self._run_main())
        except BaseException as error:
            if self._started.is_set():
                raise
            self._main.close()
            self._error = error
            self._started.set()

    async def _run_main(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._task = asyncio.ensure_future(self._main)
        self.loop.call_soon(self._started.set)
        try:
            await self._task
        except asyncio.CancelledError:
            pass
        except BaseException as error:
            logger.error("the thread %s ended: %r", self._thread.name, error)

"""An event loop in a thread of its own, which runs while other loops are blocked."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from typing import Any


class LoopThread:
    """Context manager that runs `main` in a thread of its own until the end of its block.

    Args:
        main: called and awaited in the thread; cancelled at the end of the block.
        on_failure: called in the thread with the error that `main` raises.

    Raises:
        OSError: on entering, if no event loop can be made, for instance for lack of file descriptors.
    """

    def __init__(
        self, name: str, main: Callable[[], Coroutine[Any, Any, object]], on_failure: Callable[[BaseException], object]
    ) -> None:
        self._main = main
        self._on_failure = on_failure
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._started = threading.Event()
        self._error: BaseException | None = None  # that kept `main` from starting
        self._loop: asyncio.AbstractEventLoop
        self._task: asyncio.Task[object]

    def __enter__(self) -> LoopThread:
        self._thread.start()
        self._started.wait()
        if self._error is not None:
            raise self._error
        return self

    def __exit__(self, *_: object) -> None:
        self.soon(self._task.cancel)
        self._thread.join()

    def soon(self, function: Callable[..., object], *args: Any) -> None:
        """Call a function in the thread, from any other thread. Does nothing once the thread has ended."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *args)

    def _run(self) -> None:
        try:
            asyncio.run(self._to_its_end())
        except BaseException as error:
            if self._started.is_set():
                raise
            self._error = error
            self._started.set()

    async def _to_its_end(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.ensure_future(self._main())
        self._loop.call_soon(self._started.set)
        try:
            await self._task
        except asyncio.CancelledError:
            pass
        except BaseException as error:
            self._on_failure(error)

"""Tasks that end together, and whose first failure is known at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from titan_rl.cancellation import stray_cancellation_fails


class TaskScope(asyncio.TaskGroup):
    """A task group that says what failed before the other tasks have been cancelled, which may take them a while.

    Args:
        on_error: called when `error` is there.
    """

    def __init__(self, on_error: Callable[[], object]) -> None:
        super().__init__()
        self.error: Exception | None = None  # of the task that failed first
        self._on_error = on_error

    def begin(self, work: Callable[[], Awaitable[None]], name: str) -> asyncio.Task[None]:
        """A task. That it was cancelled, though nobody asked for that, is a failure too."""

        async def noting_failure() -> None:
            try:
                with stray_cancellation_fails(name):
                    await work()
            except Exception as error:
                self.error = self.error or error
                self._on_error()
                raise

        return self.create_task(noting_failure(), name=name)

"""Tasks that end together, and whose first failure is known at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from titan_rl.cancellation import stray_cancellation_fails
from titan_rl.errors import TrainingError
from titan_rl.user_code import describe


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
            except asyncio.CancelledError:
                raise
            except BaseException as error:
                self.error = self.error or _as_exception(error, name)
                self._on_error()
                raise

        return self.create_task(noting_failure(), name=name)


def _as_exception(error: BaseException, name: str) -> Exception:
    """What `next_batch` raises: no task of others is to end as by SystemExit, or by what no `except Exception` sees."""
    if isinstance(error, Exception):
        return error
    raised = TrainingError(f"{name} raised {describe(error)}")
    raised.__cause__ = error
    return raised

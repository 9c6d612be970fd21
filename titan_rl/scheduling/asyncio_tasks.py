"""asyncio task group that records its first failure immediately, and a coroutine whose end is always reported."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from types import TracebackType
from typing import Any

from titan_rl.core.calls.user_code import describe
from titan_rl.core.errors import StrayCancellationError, TrainingError


class FirstFailureTaskGroup(asyncio.TaskGroup):
    """Task group that records the first failure before it cancels the other tasks, which may take a while.

    A task may end as cancelled only if this scope cancelled it, with `cancel` or at the end of the scope. Any other
    cancellation is a failure.

    Args:
        failed: Event that is set once `error` is known.
    """

    def __init__(self, failed: asyncio.Event) -> None:
        super().__init__()
        self.error: Exception | None = None  # error of the task that failed first
        self._failed = failed
        self._cancelled: set[asyncio.Task[None]] = set()
        self._is_ending = False

    def begin(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = self.create_task(work, name=name)
        task.add_done_callback(self._note_end)
        return task

    def cancel(self, task: asyncio.Task[None]) -> None:
        """Cancel a task that `begin` returned."""
        if not task.done():
            self._cancelled.add(task)
            task.cancel()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_ending = True
        await super().__aexit__(kind, error, traceback)

    def _note_end(self, task: asyncio.Task[None]) -> None:
        was_to_end = self._is_ending or self.error is not None or task in self._cancelled
        self._cancelled.discard(task)
        error = None
        try:
            error = task.exception()
        except asyncio.CancelledError as cancellation:
            if not was_to_end:
                error = StrayCancellationError(f"{task.get_name()} was cancelled, although nobody requested it")
                error.__cause__ = cancellation
                self.create_task(_fail(error))  # a task group ignores cancelled tasks
        if error is not None and self.error is None:
            self.error = _as_exception(error, task.get_name())
            self._failed.set()


class WithEndCallback(Coroutine[Any, Any, None]):
    """Coroutine that runs `work` and calls `on_end` once when it returns or raises.

    A task that is cancelled before its first turn throws into a coroutine that has not begun, so no `except` or
    `finally` in its body runs. `on_end` is called even then.
    """

    def __init__(self, work: Coroutine[Any, Any, None], on_end: Callable[[], object]) -> None:
        self._work = work
        self._on_end: Callable[[], object] | None = on_end

    def send(self, value: Any) -> Any:
        try:
            return self._work.send(value)
        except BaseException:  # including StopIteration, which ends a coroutine that returns
            self._end()
            raise

    def throw(self, *raised: Any) -> Any:
        try:
            return self._work.throw(*raised)
        except BaseException:
            self._end()
            raise

    def close(self) -> None:
        try:
            self._work.close()
        finally:
            self._end()

    def __await__(self) -> Generator[Any, Any, None]:
        try:
            yield from self._work.__await__()
        finally:
            self._end()

    def _end(self) -> None:
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end()


async def _fail(error: BaseException) -> None:
    raise error


def _as_exception(error: BaseException, name: str) -> Exception:
    """Error for `next_batch` to raise. Errors such as SystemExit are wrapped, so that they do not end other tasks."""
    if isinstance(error, Exception):
        return error
    raised = TrainingError(f"{name} raised {describe(error)}")
    raised.__cause__ = error
    return raised

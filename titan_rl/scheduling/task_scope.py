"""Tasks that end together, whose first failure is known at once, and whose end is told of in any case."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from types import TracebackType
from typing import Any

from titan_rl.core.calls.user_code import describe
from titan_rl.core.errors import StrayCancellationError, TrainingError


class TaskScope(asyncio.TaskGroup):
    """A task group that says what failed before the other tasks have been cancelled, which may take them a while.

    It knows which of its tasks were to be cancelled: all when it ends, and what `cancel` was called for. That another
    one ends as cancelled, whoever has cancelled it, is a failure.

    Args:
        on_error: called when `error` is there.
    """

    def __init__(self, on_error: Callable[[], object]) -> None:
        super().__init__()
        self.error: Exception | None = None  # of the task that failed first
        self._on_error = on_error
        self._cancelled: set[asyncio.Task[None]] = set()
        self._is_ending = False

    def begin(self, work: Callable[[], Coroutine[Any, Any, None]], name: str) -> asyncio.Task[None]:
        task = self.create_task(work(), name=name)
        task.add_done_callback(self._note_end)
        return task

    def cancel(self, task: asyncio.Task[None]) -> None:
        """Cancel one that `begin` gave."""
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
                error = StrayCancellationError(f"{task.get_name()} was cancelled, though nobody had asked for that")
                error.__cause__ = cancellation
                self.create_task(_fail(error))  # a task group takes no notice of one that was cancelled
        if error is not None and self.error is None:
            self.error = _as_exception(error, task.get_name())
            self._on_error()


class WithEndCallback(Coroutine[Any, Any, None]):
    """Runs `work`, and calls `on_end` once when it returns or raises.

    A task that is cancelled before its first turn throws into a coroutine that has not begun, where neither an `except`
    nor a `finally` of its body is reached. Here `on_end` is called all the same.
    """

    def __init__(self, work: Coroutine[Any, Any, None], on_end: Callable[[], object]) -> None:
        self._work = work
        self._on_end: Callable[[], object] | None = on_end

    def send(self, value: Any) -> Any:
        return self._go_on(lambda: self._work.send(value))

    def throw(
        self,
        kind: type[BaseException] | BaseException,
        error: BaseException | object = None,
        traceback: TracebackType | None = None,
        /,
    ) -> Any:
        raised = kind if isinstance(kind, BaseException) else error if isinstance(error, BaseException) else kind()
        return self._go_on(lambda: self._work.throw(raised))

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

    def _go_on(self, advance: Callable[[], Any]) -> Any:
        try:
            return advance()
        except BaseException:  # StopIteration, with which it returns, too
            self._end()
            raise

    def _end(self) -> None:
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end()


async def _fail(error: BaseException) -> None:
    raise error


def _as_exception(error: BaseException, name: str) -> Exception:
    """What `next_batch` raises: no task of others is to end as by SystemExit, or by what no `except Exception` sees."""
    if isinstance(error, Exception):
        return error
    raised = TrainingError(f"{name} raised {describe(error)}")
    raised.__cause__ = error
    return raised

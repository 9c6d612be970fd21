"""Time limits for awaiting a user's code, which hold even if it ignores its cancellation."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncGenerator, Awaitable
from contextlib import asynccontextmanager
from typing import Any, Generic, TypeVar

from titan_rl.core.calls.cancellation import must_propagate
from titan_rl.core.calls.user_code import record_location, summary, task_location
from titan_rl.core.errors import StrayCancellationError

T = TypeVar("T")

logger = logging.getLogger(__name__)


class OutOfTimeError(TimeoutError):
    """A call exceeded its time limit; the called code did not raise this itself."""


_left_behind: set[asyncio.Task[Any]] = set()  # asyncio itself holds tasks weakly


class BoundedCall(Generic[T]):
    """Awaitable that runs in a new task at once, with a deadline that can be rescheduled.

    At the deadline, or when the caller of `result` is cancelled, the task is cancelled and has `cleanup_s` seconds to
    end. Otherwise it is abandoned with a warning.

    Args:
        what: Name of the call in messages.
        error_type: Raised instead of errors that are not an `Exception`, such as SystemExit or a panic of native code,
            which would end the caller or the event loop. The original error is the cause.
        late: Message of `OutOfTimeError`.
    """

    def __init__(
        self,
        work: Awaitable[T],
        what: str,
        *,
        cleanup_s: float = 5.0,
        error_type: type[Exception] = RuntimeError,
        late: str = "it took too long",
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._work = work
        self._task = self._loop.create_task(_awaited(work, error_type))
        self._what = what
        self._cleanup_s = cleanup_s
        self._late = late
        self._timer: asyncio.TimerHandle | None = None
        self._expired = False
        self._location: str | None = None
        self._waiter: asyncio.Future[None] | None = None

    def when(self) -> float | None:
        """The deadline by the event loop's clock, or None."""
        return None if self._timer is None else self._timer.when()

    def reschedule(self, when: float | None) -> None:
        """Set another deadline, or none. Does nothing once the deadline has passed."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if when is None else self._loop.call_at(when, self._expire)

    def expired(self) -> bool:
        """Whether the deadline passed before the call ended."""
        return self._expired

    async def result(self) -> T:
        """The result of the call. May be awaited once.

        Raises:
            OutOfTimeError: the deadline passed. Names the line of the user's code at which the call waited.
            StrayCancellationError: the call was cancelled, but not by its caller.
            Exception: the error of the call, or an `error_type`.
        """
        task = self._task
        try:
            if not self._expired:
                self._waiter = self._loop.create_future()
                task.add_done_callback(self._wake)
                await self._waiter
        except asyncio.CancelledError:
            await self._end()
            raise
        finally:
            if self._timer is not None:
                self._timer.cancel()
        if self._expired:
            if (cancelled := await self._end()) is not None:
                raise cancelled
            late = OutOfTimeError(self._late)
            record_location(late, self._location)
            raise late
        try:
            return task.result()
        except asyncio.CancelledError as error:
            self._close_unstarted()
            raise StrayCancellationError(f"{self._what} was cancelled, although nobody requested it") from error

    def _expire(self) -> None:
        if not self._task.done():
            self._expired = True
            self._location = task_location(self._task)
            self._wake()

    def _wake(self, _: object = None) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _end(self) -> asyncio.CancelledError | None:
        """Cancel the task and wait for its end, ignoring its result. Returns a cancellation of the caller that arrives
        in the meantime."""
        task, loop = self._task, self._loop
        _left_behind.add(task)
        task.add_done_callback(_forget)
        task.cancel()
        deadline, cancelled = loop.time() + self._cleanup_s, None
        while not task.done() and (left_s := deadline - loop.time()) > 0:
            try:
                await asyncio.wait({task}, timeout=left_s)
            except asyncio.CancelledError as error:
                cancelled = error
        if task.done():
            self._close_unstarted()
        else:
            seconds = f"{self._cleanup_s:g} s"
            logger.warning("%s does not end within %s of its cancellation, and is abandoned", self._what, seconds)
        return cancelled

    def _close_unstarted(self) -> None:
        """Close a coroutine whose task was cancelled before it started."""
        if inspect.iscoroutine(self._work):
            self._work.close()


async def bounded(
    work: Awaitable[T],
    timeout_s: float | None,
    what: str,
    *,
    cleanup_s: float = 5.0,
    error_type: type[Exception] = RuntimeError,
) -> T:
    """Await `work` for at most `timeout_s` seconds; see `BoundedCall`.

    Raises:
        Exception: see `BoundedCall.result`.
    """
    late = "" if timeout_s is None else f"it took longer than {timeout_s:g} s"
    call = BoundedCall(work, what, cleanup_s=cleanup_s, error_type=error_type, late=late)
    if timeout_s is not None:
        call.reschedule(asyncio.get_running_loop().time() + timeout_s)
    return await call.result()


async def _awaited(work: Awaitable[T], error_type: type[Exception]) -> T:
    task = asyncio.current_task()
    try:
        return await work
    except (Exception, asyncio.CancelledError):
        raise
    except BaseException as error:
        if must_propagate(error, task):
            raise
        raise error_type(summary(error)) from error


@asynccontextmanager
async def limited(seconds: float, what: str) -> AsyncGenerator[asyncio.Timeout]:
    """Like `asyncio.timeout`, with an error message that names the operation and the limit.

    Args:
        seconds: Time limit of the block.
        what: Name of the operation for the message, such as "the pull of version 7".

    Raises:
        OutOfTimeError: the block took longer.
    """
    scope = asyncio.timeout(seconds)
    try:
        async with scope:
            yield scope
    except TimeoutError as error:
        if not scope.expired():
            raise
        raise OutOfTimeError(f"{what} took longer than {seconds:g} s") from error


def _forget(task: asyncio.Task[Any]) -> None:
    _left_behind.discard(task)
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.debug("a call that was cancelled ended with %r", error)

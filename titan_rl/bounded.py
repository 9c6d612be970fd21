"""Awaiting what a user's code does, for a limited time and however it takes being cancelled."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncGenerator, Awaitable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from titan_rl.errors import StrayCancellationError
from titan_rl.interrupts import passes
from titan_rl.user_code import summary

T = TypeVar("T")

logger = logging.getLogger(__name__)


class OutOfTimeError(TimeoutError):
    """A call took longer than it may: this limit's own error, not one that the called code raised."""


_left_behind: set[asyncio.Task[Any]] = set()  # asyncio itself holds tasks weakly


async def bounded(
    work: Awaitable[T],
    timeout_s: float | None,
    what: str,
    *,
    cleanup_s: float = 5.0,
    error_type: type[Exception] = RuntimeError,
) -> T:
    """What `work` gives, within `timeout_s` seconds. It runs as a task of its own.

    When its time is up, or the caller is cancelled, it is cancelled and has `cleanup_s` seconds to end. One that does
    not is left behind with a warning, so that nothing waits for it.

    Args:
        what: names it in messages.
        error_type: raised in the place of what is no `Exception`, as SystemExit or a panic of native code, and would
            end the caller or the event loop; that is the cause.

    Raises:
        OutOfTimeError: it took longer.
        StrayCancellationError: it ended as cancelled, and nobody had cancelled it here.
        Exception: what it raised, or an `error_type`.
    """
    task = asyncio.ensure_future(_awaited(work, error_type))
    if inspect.iscoroutine(work):
        task.add_done_callback(lambda _: work.close())  # one that was cancelled before its first turn
    try:
        await _until_done(task, timeout_s)
    except asyncio.CancelledError:
        await _end(task, what, cleanup_s)
        raise
    if not task.done():
        if (cancelled := await _end(task, what, cleanup_s)) is not None:
            raise cancelled
        raise OutOfTimeError(f"it took longer than {timeout_s:g} s")
    try:
        return task.result()
    except asyncio.CancelledError as error:
        raise StrayCancellationError(f"{what} was cancelled, though nobody had asked for that") from error


async def _awaited(work: Awaitable[T], error_type: type[Exception]) -> T:
    task = asyncio.current_task()
    try:
        return await work
    except (Exception, asyncio.CancelledError):
        raise
    except BaseException as error:
        if passes(error, task):
            raise
        raise error_type(summary(error)) from error


@asynccontextmanager
async def limited(seconds: float, what: str) -> AsyncGenerator[None]:
    """As `asyncio.timeout`, with an error that can be told: it says what took how long.

    Args:
        what: "the pull of version 7".

    Raises:
        OutOfTimeError: the block took longer.
    """
    scope = asyncio.timeout(seconds)
    try:
        async with scope:
            yield
    except TimeoutError as error:
        if not scope.expired():
            raise
        raise OutOfTimeError(f"{what} took longer than {seconds:g} s") from error


async def _end(task: asyncio.Task[Any], what: str, cleanup_s: float) -> asyncio.CancelledError | None:
    """Cancel `task` and wait for it, also if the caller is cancelled meanwhile: that is returned. What the task ends
    with is of no use any more."""
    _left_behind.add(task)
    task.add_done_callback(_forget)
    task.cancel()
    loop = asyncio.get_running_loop()
    deadline, cancelled = loop.time() + cleanup_s, None
    while not task.done() and (left_s := deadline - loop.time()) > 0:
        try:
            await _until_done(task, left_s)
        except asyncio.CancelledError as error:
            cancelled = error
    if not task.done():
        logger.warning("%s does not end %g s after it was cancelled, and is left behind", what, cleanup_s)
    return cancelled


async def _until_done(task: asyncio.Task[Any], timeout_s: float | None) -> None:
    """As `asyncio.wait` of one task, in half the time."""
    loop = asyncio.get_running_loop()
    waiter: asyncio.Future[None] = loop.create_future()

    def wake(_: object = None) -> None:
        if not waiter.done():
            waiter.set_result(None)

    task.add_done_callback(wake)
    timer = None if timeout_s is None else loop.call_later(timeout_s, wake)
    try:
        await waiter
    finally:
        task.remove_done_callback(wake)
        if timer is not None:
            timer.cancel()


def _forget(task: asyncio.Task[Any]) -> None:
    _left_behind.discard(task)
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.debug("a call that was cancelled ended with %r", error)

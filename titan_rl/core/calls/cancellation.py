"""Ownership of cancellations, of Ctrl-C, and of the error that ends a program; concurrent calls that are cancelled at
the first failure.

A task obeys its own cancellation. But awaiting a future of a closed client, or a task that a judge cancelled itself,
also raises `CancelledError`, in a task that nobody has cancelled: this is a failure of the awaited code. `except
Exception` does not catch it, so the task would end as if it had been cancelled.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import signal
import threading
from collections.abc import Coroutine, Generator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, TypeVar, cast

from titan_rl.core.calls.user_code import summary, with_causes
from titan_rl.core.errors import StrayCancellationError

T = TypeVar("T")


def cancel_requested(task: asyncio.Task[Any] | None = None) -> bool:
    """Whether `task`, by default the current one, has been cancelled and the request still stands.

    The task may be done. True outside a task, where this cannot be known: the cancellation then propagates.
    """
    task = task or asyncio.current_task()
    return task is None or task.cancelling() > 0


@contextmanager
def stray_cancellation_fails(what: str) -> Generator[None]:
    """Context around awaits of user code, which turns a cancellation that nobody requested into an error.

    Example:

        try:
            async with asyncio.timeout(10.0):
                with stray_cancellation_fails("closing the environment"):
                    await env.close()
        except Exception as error:  # a stray cancellation too; one of this task passes
            ...

    Args:
        what: Beginning of the message: "closing the environment was cancelled, although nobody requested it".

    Raises:
        StrayCancellationError: the awaited code was cancelled, although this task was not.
    """
    try:
        yield
    except asyncio.CancelledError as error:
        if cancel_requested():
            raise
        raise StrayCancellationError(f"{what} was cancelled, although nobody requested it") from error


def is_ctrl_c(error: BaseException) -> bool:
    """Whether an error is Ctrl-C or SIGTERM, and not a `KeyboardInterrupt` that some code raised.

    The exception of asyncio's handler, or of one written in Python, comes from the handler's frame. Python's default
    handler leaves no frame: if it is installed, as outside an event loop, every interrupt of the main thread counts as
    Ctrl-C. A run's own handlers raise nothing.
    """
    if isinstance(error, Exception) or threading.current_thread() is not threading.main_thread():
        return False
    if isinstance(error, KeyboardInterrupt) and signal.getsignal(signal.SIGINT) in (None, signal.default_int_handler):
        return True
    code = _raised_by(error.__traceback__)
    return any(code is _code_of(signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM))


def _code_of(handler: Any) -> object:
    """Code of a signal handler; an unequal object for one that is not written in Python."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    return getattr(handler, "__code__", object())


def must_propagate(error: BaseException, task: asyncio.Task[Any] | None) -> bool:
    """Whether an error must pass through handlers of user errors: Ctrl-C, or the closing of an abandoned coroutine.

    Args:
        task: Task in which the handler's coroutine runs.
    """
    if isinstance(error, GeneratorExit):
        try:
            return asyncio.current_task() is not task
        except RuntimeError:  # no loop runs
            return True
    return is_ctrl_c(error)


def _raised_by(traceback: TracebackType | None) -> object:
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    return None if traceback is None else traceback.tb_frame.f_code


async def gather_or_cancel(calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Results of all calls, run concurrently. The first failure cancels the others and is raised unchanged."""
    if len(calls) == 1:
        return [await calls[0]]
    failure: Exception | None = None
    running: list[asyncio.Task[T]] = []
    try:
        async with asyncio.TaskGroup() as tasks:
            running.extend(tasks.create_task(call) for call in calls)
    except ExceptionGroup as group:
        failure = _first(group)
    if failure is not None:
        raise failure  # outside the handler, so that its cause stays the function's own exception
    return [task.result() for task in running]


def _first(group: ExceptionGroup[Exception]) -> Exception:
    error = group.exceptions[0]
    return _first(cast("ExceptionGroup[Exception]", error)) if isinstance(error, ExceptionGroup) else error


logger = logging.getLogger(__name__)


class FirstError:
    """Raises the error that ended a program instead of an error of its cleanup, which becomes a note.

    Example: the journal cannot be closed because the disk is full, but the trainer's error is raised:

        first = FirstError()
        with first.wins(), closing(journal), first.source():
            train()
    """

    def __init__(self) -> None:
        self._error: Exception | None = None

    @contextmanager
    def source(self) -> Generator[None]:
        """Context of the program itself, inside the cleanup. A cancellation is not an error."""
        try:
            yield
        except asyncio.CancelledError:
            raise
        except Exception as error:
            self._error = error
            raise

    @contextmanager
    def wins(self) -> Generator[None]:
        """Context around the cleanup.

        Raises:
            Exception: the error of `source`, unless the error that leaves the block is this error or contains it.
        """
        hidden: Exception | None = None
        try:
            yield
        except Exception as last:
            if self._error is None or self._error in with_causes(last):
                raise
            hidden = self._error
            logger.warning("cleaning up failed", exc_info=last)
            hidden.add_note(f"cleaning up failed, too: {summary(last)}")
        if hidden is not None:
            raise hidden from hidden.__cause__

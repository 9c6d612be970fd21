"""Ownership of cancellations, of Ctrl-C, and of the error that ends a program.

A task obeys its own cancellation. Awaiting a future of a client that closed, or a task that a judge cancelled itself,
raises `CancelledError`, too, in a task that nobody has cancelled: that is a failure of the awaited code. `except
Exception` does not see it, and the task would end as if it had been told to.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import signal
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, cast

from titan_rl.core.calls.user_code import summary
from titan_rl.core.errors import StrayCancellationError


def asked_to_cancel(task: asyncio.Task[Any] | None = None) -> bool:
    """Whether somebody has cancelled `task`, by default the current one, and the request still stands.

    Also of a task that is done. True where there is no task: nothing can be told then, and a cancellation goes on.
    """
    task = task or asyncio.current_task()
    return task is None or task.cancelling() > 0


@contextmanager
def stray_cancellation_fails(what: str) -> Generator[None]:
    """Within the block, around awaits of code that is not ours, a cancellation that nobody asked for is an error.

    Example:

        try:
            async with asyncio.timeout(10.0):
                with stray_cancellation_fails("closing the environment"):
                    await env.close()
        except Exception as error:  # a stray cancellation too; one of this task passes
            ...

    Args:
        what: begins the message: "closing the environment was cancelled, though nobody had asked for that".

    Raises:
        StrayCancellationError: what was awaited was cancelled, and this task was not.
    """
    try:
        yield
    except asyncio.CancelledError as error:
        if asked_to_cancel():
            raise
        raise StrayCancellationError(f"{what} was cancelled, though nobody had asked for that") from error


def is_ctrl_c(error: BaseException) -> bool:
    """Whether a person has pressed Ctrl-C. Else a `KeyboardInterrupt` is as any exception of the code that raised it.

    What asyncio's handler, or one written in Python, raises comes from its frame. Python's default handler leaves no
    frame: where it is installed, as outside an event loop, an interrupt of the main thread passes for a person's. A run
    has handlers that raise nothing.
    """
    if not isinstance(error, KeyboardInterrupt) or threading.current_thread() is not threading.main_thread():
        return False
    handler = signal.getsignal(signal.SIGINT)
    if handler in (None, signal.default_int_handler):
        return True
    while isinstance(handler, functools.partial):
        handler = handler.func
    return _raised_by(error.__traceback__) is getattr(handler, "__code__", object())


def passes(error: BaseException, task: asyncio.Task[Any] | None) -> bool:
    """Whether it is for no handler of what user code raises: Ctrl-C, or the closing of a coroutine that is not run.

    Args:
        task: that the handler's coroutine runs in.
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


logger = logging.getLogger(__name__)


class FirstError:
    """Raises what ended a program in the place of what its cleanup raises, which becomes a note of it.

    Example: the journal cannot be closed on a disk that is full, and yet it is the trainer's error that is told:

        first = FirstError()
        with first.wins(), closing(journal), first.source():
            train()
    """

    def __init__(self) -> None:
        self._error: Exception | None = None

    @contextmanager
    def source(self) -> Generator[None]:
        """Around the program itself, within what is cleaned up. A cancellation ends a program without an error."""
        try:
            yield
        except asyncio.CancelledError:
            raise
        except Exception as error:
            self._error = error
            raise

    @contextmanager
    def wins(self) -> Generator[None]:
        """Around all that is cleaned up.

        Raises:
            Exception: what `source` raised, unless that is, or is part or cause of, what leaves the block.
        """
        hidden: Exception | None = None
        try:
            yield
        except Exception as last:
            if self._error is None or self._error in _told_by(last):
                raise
            hidden = self._error
            logger.warning("cleaning up failed", exc_info=last)
            hidden.add_note(f"cleaning up failed, too: {summary(last)}")
        if hidden is not None:
            raise hidden from hidden.__cause__


def _told_by(error: BaseException) -> Iterator[BaseException]:
    """An error, the members of a group, and what they say they were caused by."""
    seen: set[int] = set()
    waiting: list[BaseException] = [error]
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        if one.__cause__ is not None:
            waiting.append(one.__cause__)
        if isinstance(one, BaseExceptionGroup):
            waiting.extend(cast("BaseExceptionGroup[Any]", one).exceptions)

"""Whose is what ends a program or a coroutine? Python's own, which is obeyed, or that of user code, which raised it."""

from __future__ import annotations

import asyncio
import functools
import signal
import threading
from types import TracebackType
from typing import Any


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

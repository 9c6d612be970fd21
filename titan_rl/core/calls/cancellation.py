"""Whose cancellation is it? A task's own, which it obeys, or that of something it awaits, which is a failure.

A future of a client that closed, a task that a judge cancelled itself: awaiting either raises `CancelledError` in a
task that nobody has cancelled. `except Exception` does not see it, and the task ends as if it had been told to.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

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

"""The event loop of a program that is to end in order, whatever runs in it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from titan_rl.calls.threads import UsersThreads

T = TypeVar("T")


def run_to_its_end(program: Coroutine[Any, Any, T]) -> T:
    """What `program` gives, run as by `asyncio.run`.

    A `SystemExit` or `KeyboardInterrupt` of a task or callback ends an event loop on the spot, with all that runs in it
    cancelled at once. Here it cancels the program alone, which so can save and close what it has, however many follow.
    The end waits for nothing that hangs in a thread of `asyncio.to_thread`, either.

    Raises:
        SystemExit, KeyboardInterrupt: the first of them, once the program has ended.
        BaseException: what the program raises.
    """
    exit_of_others: BaseException | None = None
    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        loop.set_default_executor(UsersThreads())
        task = loop.create_task(program)
        while not task.done():
            try:
                loop.run_until_complete(task)
            except (SystemExit, KeyboardInterrupt) as error:
                if exit_of_others is None and not task.done():
                    exit_of_others = error
                    task.cancel()
            except BaseException:
                if not task.done():  # the loop itself has failed
                    raise
        if exit_of_others is not None:
            if not task.cancelled():
                task.exception()  # it ended so because it was to end
            raise exit_of_others
        return task.result()

"""The event loop of a program that is to end in order, whatever runs in it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from titan_rl.core.calls.threads import UsersThreads

T = TypeVar("T")


def run_to_its_end(program: Coroutine[Any, Any, T]) -> T:
    """What `program` gives, run as by `asyncio.run`.

    A `SystemExit` or `KeyboardInterrupt` of a task or callback ends an event loop on the spot, with all that runs in it
    cancelled at once. Here it cancels the program alone, which so can save and close what it has, however many follow.
    The end waits for nothing that hangs in a thread of `asyncio.to_thread`, either.

    Where this thread has a running loop, as in a notebook, the program runs in a thread of its own, and this one waits.
    Ctrl-C then cancels the program.

    Raises:
        SystemExit, KeyboardInterrupt: the first of them, once the program has ended.
        BaseException: what the program raises.
    """
    return _run(program) if asyncio._get_running_loop() is None else _in_thread(program)


def _in_thread(program: Coroutine[Any, Any, T]) -> T:
    outcome: Future[T] = Future()
    begun: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[T]]] = []

    def work() -> None:
        try:
            outcome.set_result(_run(program, lambda loop, task: begun.append((loop, task))))
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=work, name="event loop").start()
    interrupted = False
    while True:
        try:
            return outcome.result()
        except KeyboardInterrupt:
            if outcome.done():
                raise
            interrupted = True
            for loop, task in begun:
                loop.call_soon_threadsafe(task.cancel)
        except asyncio.CancelledError:
            if interrupted:
                raise KeyboardInterrupt from None
            raise


def _run(
    program: Coroutine[Any, Any, T],
    begun: Callable[[asyncio.AbstractEventLoop, asyncio.Task[T]], object] = lambda loop, task: None,
) -> T:
    exit_of_others: BaseException | None = None
    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        loop.set_default_executor(UsersThreads())
        task = loop.create_task(program)
        begun(loop, task)
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

"""Calls of environment methods: coroutines on the event loop, plain functions in a thread of the environment."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import itertools
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TypeVar

from titan_rl.core.calls.user_code import (
    describe,
    is_async,
    record_location,
    source_location,
    task_location,
    thread_location,
)

logger = logging.getLogger(__name__)

_numbers = itertools.count()
_here = threading.local()


class ThreadedEnv:
    """A `TokenEnv` or `MessageEnv` that runs entirely, from its construction on, in its own daemon thread.

    The environment's methods may be plain functions that block, or coroutines. Coroutines run on an event loop of that
    thread, and cannot await objects of other loops. A call that is cancelled, by a time limit for instance, is
    abandoned: its late result is ignored, and the environment is closed when the call returns, if it ever does.

    Example: an environment of chat messages with plain functions:

        MessageTokenEnv(ThreadedEnv(lambda: BrowserEnv(sample)), renderer)

    `rollout.env_in_thread = true` does this for the whole environment of a task.

    Args:
        make_env: Makes the environment. Called in the environment's thread, before `reset`.
    """

    def __init__(self, make_env: Callable[[], Any]) -> None:
        self._make_env = make_env
        self.made: Any = None  # the environment
        self._calls = CallsInThread()

    async def reset(self) -> Any:
        return await self._calls.run(self._make_and_reset)

    async def step(self, given: Any) -> Any:
        return await self._calls.run(self.made.step, given)

    async def close(self) -> None:
        """Close the environment. Returns at once if an abandoned call is still running; closing follows it."""
        if self._calls.has_started:
            await self._calls.end_with(self._close_made)

    def _make_and_reset(self) -> Any:
        self.made = self._make_env()
        return self.made.reset()

    def _close_made(self) -> Any:
        return None if self.made is None else self.made.close()


class _Call:
    """Call of a method in the thread, awaited by another event loop.

    Args:
        method: The method.
        arguments: Arguments of the method.
        awaits: Whether an awaitable result is awaited in the thread. Otherwise the awaitable is the call's result.
    """

    def __init__(self, method: Callable[..., Any], arguments: tuple[Any, ...], awaits: bool) -> None:
        self._method = method
        self._arguments = arguments
        self._awaits = awaits
        self.answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._context = contextvars.copy_context()
        self._task: asyncio.Task[Any] | None = None  # task in the thread's own event loop
        self._waiting = asyncio.get_running_loop()

    def abandon(self) -> None:
        """Abandon the call. A coroutine is cancelled; a function that blocks cannot be."""
        if (task := self._task) is not None:
            with suppress(RuntimeError):  # the task's event loop is closed
                task.get_loop().call_soon_threadsafe(task.cancel)

    def location(self) -> str | None:
        """Line of user code at which the call's coroutine waits; None if no coroutine runs."""
        return None if (task := self._task) is None else task_location(task)

    def run(self, runner: asyncio.Runner) -> None:
        """Run the call; called in the thread."""
        result, failure = None, None
        try:
            result = self._context.run(self._method, *self._arguments)
            if self._awaits and inspect.isawaitable(result):
                result = runner.run(self._awaited(result), context=self._context)
        except (StopIteration, GeneratorExit) as error:  # a future cannot hold these
            failure = RuntimeError(f"{type(error).__name__}: {error}")
            failure.__cause__ = error
        except BaseException as error:  # such as SystemExit, which the rollouter handles
            failure = error
        with suppress(RuntimeError):  # the waiting event loop is closed
            self._waiting.call_soon_threadsafe(self._settle, result, failure)

    async def _awaited(self, awaitable: Any) -> Any:
        self._task = asyncio.current_task()
        try:
            return await awaitable
        finally:
            self._task = None

    def _settle(self, result: Any, failure: BaseException | None) -> None:
        if self.answer.done():
            return
        if failure is not None:
            self.answer.set_exception(failure)
        else:
            self.answer.set_result(result)


class CallsInThread:
    """Sequential calls in one daemon thread, which starts with the first call.

    Args:
        awaits: Whether coroutines that calls return are awaited in the thread, on its own event loop. Otherwise a call
            returns the coroutine.
    """

    def __init__(self, *, awaits: bool = True) -> None:
        self._awaits = awaits
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._has_abandoned_call = self._is_ended = False

    @property
    def has_started(self) -> bool:
        return self._thread is not None

    async def run(self, method: Callable[..., Any], *arguments: Any) -> Any:
        """Call a method in the thread, and return its result."""
        call = _Call(method, arguments, self._awaits)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=f"env-{next(_numbers)}", daemon=True)
            self._thread.start()
        self._calls.put(call)
        try:
            return await call.answer
        except asyncio.CancelledError as error:
            if call.answer.cancelled():
                record_location(error, call.location() or thread_location(self._thread.ident))
                call.abandon()
                self._has_abandoned_call = True
                logger.warning("abandoned a call in thread %s", self._thread.name)
            raise

    async def end_with(self, method: Callable[[], Any]) -> Any:
        """Make the last call and return its result, or None if the call is queued behind an abandoned one."""
        try:
            if not self._has_abandoned_call:
                return await self.run(method)
            last = _Call(method, (), self._awaits)
            last.answer.add_done_callback(_log_failure)
            self._calls.put(last)
            return None
        finally:
            self.end()

    def end(self) -> None:
        """End the thread after its queued calls. Further calls do nothing."""
        if self._thread is not None and not self._is_ended:
            self._is_ended = True
            self._calls.put(None)

    def _work(self) -> None:
        _here.is_env_thread = True
        runner = asyncio.Runner()  # creates its loop lazily: a loop holds three descriptors
        try:
            while (call := self._calls.get()) is not None:
                call.run(runner)
        finally:
            runner.close()


def _log_failure(answer: asyncio.Future[Any]) -> None:
    if not answer.cancelled() and (error := answer.exception()) is not None:
        logger.warning("closing an abandoned environment failed: %s", describe(error))


T = TypeVar("T")


class EnvMethods:
    """Calls of the methods of one environment.

    A coroutine method runs on the event loop. A plain method runs in the environment's own thread, so that it blocks no
    other rollout and time limits apply; an awaitable result is awaited. Inside a `ThreadedEnv` all methods run in its
    thread.

    Example:

        methods = EnvMethods(env)
        observation = await methods.call("reset", MessageObservation)
        step = await methods.call("step", MessageStep, message)
        await methods.close()
    """

    def __init__(self, env: Any) -> None:
        self.env = env
        self._calls: CallsInThread | None = None

    async def call(self, name: str, kind: type[T], *arguments: Any) -> T:
        """Result of a method, checked to be an instance of `kind`.

        Raises:
            TypeError: the result is of another type. Names the method's line, the type of the result, and `kind`.
        """
        return expected(await self.result(name, *arguments), kind, self.env, name)

    async def result(self, name: str, *arguments: Any) -> Any:
        """Result of a method, of any type."""
        method = getattr(self.env, name)
        if not self._runs_in_thread(method):
            return await _awaited(method(*arguments))
        if self._calls is None:
            self._calls = CallsInThread(awaits=False)
        return await _awaited(await self._calls.run(method, *arguments))

    async def close(self) -> None:
        """Close the environment and end its thread. Returns at once if an abandoned call still runs in the thread; a
        plain `close` follows that call."""
        method = self.env.close
        try:
            if self._runs_in_thread(method):
                self._calls = self._calls or CallsInThread(awaits=False)
                await _awaited(await self._calls.end_with(method))
            else:
                await _awaited(method())
        finally:
            if self._calls is not None:
                self._calls.end()

    def _runs_in_thread(self, method: Any) -> bool:
        return not (is_async(method) or getattr(_here, "is_env_thread", False))


def require_methods(env: object) -> None:
    """Check that an environment has the methods of a `MessageEnv`.

    Raises:
        TypeError: "SortEnv has no method close; an environment has three: reset, step and close".
    """
    for name in ("reset", "step", "close"):
        if not callable(getattr(env, name, None)):
            kind = "None" if env is None else type(env).__name__
            raise TypeError(f"{kind} has no method {name}; an environment has three: reset, step and close")


def expected(given: Any, kind: type[T], env: object, name: str) -> T:
    """Check the result `given` of an environment's method.

    Raises:
        TypeError: the result is not a `kind`: "step of task.py:31 returned a float; a MessageStep is expected".
    """
    if isinstance(given, kind):
        return given
    while isinstance(env, ThreadedEnv):
        env = env.made
    method: Any = getattr(env, name, None)
    location = None if method is None else source_location(method)
    whose = f"{name} of {type(env).__name__}" if location is None else f"{name} of {location.partition(' in ')[0]}"
    what = "None" if given is None else _with_article(type(given).__name__)
    raise TypeError(f"{whose} returned {what}; {_with_article(kind.__name__)} is expected")


def _with_article(name: str) -> str:
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


async def _awaited(answer: Any) -> Any:
    return await answer if inspect.isawaitable(answer) else answer

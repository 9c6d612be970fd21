"""Daemon threads for blocking functions of users, which may hang but must not delay other functions or the exit."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, ParamSpec, TypeVar, cast

from titan_rl.core.calls.bounded import OutOfTimeError
from titan_rl.core.calls.pulse import PULSE
from titan_rl.core.calls.user_code import record_location, thread_location

T = TypeVar("T")
P = ParamSpec("P")

logger = logging.getLogger(__name__)


async def in_thread(fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Like `asyncio.to_thread`, but in a new thread: functions that hang in asyncio's threads cannot delay it.

    Raises:
        RuntimeError: see `DaemonThreads.run`.
    """
    return await DaemonThreads(1, "titan_rl").run(partial(fn, *args, **kwargs))


def call_within(
    fn: Callable[[], T], limit_s: float, what: str, *, progress: Callable[[], object] | None = None, advice: str = ""
) -> T:
    """Call `fn()` in a daemon thread, and wait for its result with a time limit. Ctrl-C and other signals end the
    wait.

    Args:
        limit_s: Longest time without progress.
        what: Beginning of the error message.
        progress: Returns another value after progress. By default only the end counts.
        advice: End of the error message.

    Raises:
        OutOfTimeError: there was no progress within the limit. Names the current line of the user's code.
    """
    outcome: Future[T] = Future()
    context = contextvars.copy_context()

    def limited() -> T:
        with PULSE.limited(limit_s):
            return fn()

    work = partial(_settle, outcome, partial(context.run, limited))
    thread = threading.Thread(target=work, name="user-call", daemon=True)
    thread.start()
    began, seen = time.monotonic(), progress and progress()
    while not outcome.done():
        with suppress(TimeoutError):
            outcome.exception(max(0.0, min(LOOK_S, began + limit_s - time.monotonic())))
        if progress is not None and (now := progress()) != seen:
            began, seen = time.monotonic(), now
        elif not outcome.done() and time.monotonic() - began >= limit_s:
            location = thread_location(thread.ident)
            late = OutOfTimeError(f"{what} took longer than {limit_s:g} s{advice and '; '}{advice}")
            record_location(late, location)
            raise late
    return outcome.result()


def _settle(future: Future[T], fn: Callable[[], T]) -> None:
    """Call `fn()`, and set its result or its error."""
    try:
        result = fn()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)


LOOK_S = 0.5
"""Longest interval between two checks for progress."""


class UsersThreads(ThreadPoolExecutor):
    """Default executor of a run's event loop, for users' `asyncio.to_thread` and `run_in_executor`.

    A function that hangs costs a thread, but does not keep the process from ending: neither `shutdown` nor the
    interpreter waits for the threads. There are more threads than processors, since most wait for servers.
    """

    def __init__(self, size: int = 256) -> None:
        super().__init__(size)
        self._size = size
        self._lock = threading.Lock()
        self._running = 0
        self._waiting: deque[Callable[[], None]] = deque()
        self._closed = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()

        def work() -> None:
            if future.set_running_or_notify_cancel():
                _settle(future, partial(fn, *args, **kwargs))

        with self._lock:
            if self._closed:
                raise RuntimeError("the run's event loop is closing, and accepts no more work for threads")
            self._waiting.append(work)
            if self._running == self._size:
                return future
            try:
                threading.Thread(target=self._work, name="user-thread", daemon=True).start()
            except RuntimeError:  # the system has no more threads
                self._waiting.pop()
                raise
            self._running += 1  # under the lock, so that the thread cannot end before it is counted
        return future

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._running -= 1
                    return
                work = self._waiting.popleft()
            work()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        with self._lock:
            self._closed = True


class DaemonThreads:
    """Pool of daemon threads that runs at most `size` functions at a time; others wait in FIFO order.

    asyncio's own threads are few, and the process waits for them when it exits: a function that never returns would
    block the others, and the exit. Here it costs one thread: after its time limit another thread takes its place, and
    the process ends without it.

    Args:
        size: Largest number of functions at a time, not counting those that exceeded their time limit.
        name: Prefix of the threads' names.

    Raises:
        ValueError: `size` is less than 1.
    """

    def __init__(self, size: int, name: str) -> None:
        if size < 1:
            raise ValueError(f"DaemonThreads size is {size}; it must be at least 1")
        self._size = size
        self._name = name
        self._lock = threading.Lock()
        self._threads = 0  # number of threads that may take another job
        self._queue: deque[_Job] = deque()

    async def run(self, fn: Callable[[], T], timeout_s: float | None = None) -> T:
        """Call `fn()` in a copy of the current context, and return or raise its result.

        A cancellation leaves the function running; its thread is busy until it returns or exceeds its time limit.

        Args:
            fn: Function to call.
            timeout_s: Time limit, counted from the start of the function.

        Raises:
            OutOfTimeError: the function took longer than `timeout_s`. Names the current line of the user's code.
            RuntimeError: the function raised an exception that asyncio cannot propagate, such as StopIteration or
                SystemExit, which is the cause.
        """
        job = _Job(fn, timeout_s, self)
        with self._lock:
            if self._threads < self._size:
                self._start(job)
            else:
                self._queue.append(job)
        value, error = await job.outcome
        if error is None:
            return cast("T", value)
        if isinstance(error, StopIteration) or not isinstance(error, Exception):
            raise RuntimeError(f"{type(error).__name__}: {error}") from error
        raise error

    def _start(self, job: _Job) -> None:
        threading.Thread(target=self._work, args=(job,), name=f"{self._name}-thread", daemon=True).start()
        self._threads += 1  # under the lock, so that the thread cannot end before it is counted

    def _work(self, job: _Job | None) -> None:
        while job is not None:
            job.run()
            with self._lock:
                if job.abandoned:
                    return
                job.finished = True
                job = self._next()
                self._threads -= job is None

    def _next(self) -> _Job | None:
        while self._queue:
            job = self._queue.popleft()
            if not job.outcome.cancelled():
                return job
        return None

    def abandon(self, job: _Job) -> None:
        """Abandon a job whose time is up, and start the next one in its place."""
        with self._lock:
            if job.finished:
                return
            job.abandoned = True
            self._threads -= 1
            if (waiting := self._next()) is not None:
                self._start(waiting)
        logger.warning("%s has not returned in %g s; its thread is abandoned", self._name, job.timeout_s)


class _Job:
    """Function call that an event loop waits for. `finished` and `abandoned` belong to the pool's lock."""

    def __init__(self, fn: Callable[[], object], timeout_s: float | None, pool: DaemonThreads) -> None:
        self.timeout_s = timeout_s
        self.finished = self.abandoned = False
        self._thread_id: int | None = None
        self._fn = fn
        self._pool = pool
        self._loop = asyncio.get_running_loop()
        self._context = contextvars.copy_context()
        self._timer: asyncio.TimerHandle | None = None
        self.outcome: asyncio.Future[tuple[Any, BaseException | None]] = self._loop.create_future()

    def run(self) -> None:
        """Call the function in a thread of the pool."""
        self._thread_id = threading.get_ident()
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._began)
        try:
            outcome = (self._context.run(self._fn), None)
        except BaseException as error:
            outcome = (None, error)
        try:
            self._loop.call_soon_threadsafe(self._ended, outcome)
        except RuntimeError:
            logger.debug("%s ended after its event loop", self._fn)

    def _began(self) -> None:
        if self.timeout_s is not None:
            self._timer = self._loop.call_later(self.timeout_s, self._late)

    def _ended(self, outcome: tuple[Any, BaseException | None]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if not self.outcome.done():
            self.outcome.set_result(outcome)

    def _late(self) -> None:
        self._pool.abandon(self)
        if not self.outcome.done():
            late = OutOfTimeError(f"it took longer than {self.timeout_s:g} s")
            record_location(late, thread_location(self._thread_id))
            self.outcome.set_exception(late)

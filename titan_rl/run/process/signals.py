"""Graceful stop: Ctrl-C, SIGTERM and SIGHUP cancel a program, which saves its state and closes its resources before its
event loop ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import signal
import threading
import time
from collections.abc import Coroutine, Generator, Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, TypeVar, cast

from titan_rl.cluster.hosts.folders import scratch_root
from titan_rl.core.calls.pulse import PULSE
from titan_rl.core.calls.threads import UsersThreads
from titan_rl.core.errors import TitanRLError
from titan_rl.core.run_files import record_immediate_end
from titan_rl.run.process.guard import ONE_STOP_S, SECOND_STOPS, STOPS, echoes, guarded
from titan_rl.run.terminal.standard_streams import StderrConsole

logger = logging.getLogger(__name__)

REACTION_S = 3.0


class StopSignals:
    """Handlers of SIGINT, SIGTERM and SIGHUP during a block, in the main thread.

    Python runs the handlers between two instructions of the main thread, even while user code blocks the event loop. If
    native code holds the GIL, the handlers have to wait, and the guard process acts instead.

    A signal that is ignored when the program starts stays ignored: shells ignore SIGINT for background commands, and
    `nohup` ignores SIGHUP.

    Attributes:
        code: Exit code: 0, or 128 + the number of the signal after which the program ended in order.

    Args:
        stopping: Message after the first signal. It is also an attribute, which a program may change.
        ending: Message after the second signal, which ends the process at once.
        console: Console for the messages. Defaults to standard error. It is also an attribute.
        run: Folder of a run whose status says that it was stopped if a second signal ends the process.
        reaction_s: Seconds without a reaction after which a message says that the event loop is blocked.
    """

    def __init__(
        self,
        stopping: str,
        ending: str,
        console: StderrConsole | None = None,
        *,
        run: Path | None = None,
        reaction_s: float = REACTION_S,
    ) -> None:
        self.received: signal.Signals | None = None  # the first signal
        self.code = 0
        self.console = console or StderrConsole()
        self.stopping = stopping
        self._ending = ending
        self._run = run
        self._reaction_s = reaction_s
        self._stoppable: asyncio.Task[Any] | None = None
        self._received_at = 0.0
        self._reacted = threading.Event()
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> StopSignals:
        for number in STOPS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._reacted.set()
        PULSE.stopped_at = math.inf
        if self.received is signal.SIGHUP:
            self._before[signal.SIGHUP] = signal.SIG_IGN  # another one must not cut the end of the program short
        for number, handler in self._before.items():
            signal.signal(number, handler)  # pyright: ignore[reportArgumentType]

    @contextlib.contextmanager
    def ending_in_order(self) -> Generator[None]:
        """Cancel the current task when the first signal arrives during the block, or at once if it has already arrived.
        The block then ends without an error, and `code` is set.

        Raises:
            Exception: The error that ended the block or, if it is a group, the group's first cause.
        """
        failure: BaseException | None = None
        self._stoppable = asyncio.current_task()
        if self.received is not None:
            self._cancel()
        try:
            with woken_by_signals(asyncio.get_running_loop()):
                yield
        except asyncio.CancelledError:
            if self.received is None:
                raise
            self.code = 128 + self.received
        except BaseExceptionGroup as group:
            logger.error("the run ended", exc_info=group)
            failure = first_cause(group)
        except Exception as error:
            logger.error("the run ended", exc_info=error)
            failure = error
        finally:
            self._stoppable = None
            self._reacted.set()
        if failure is not None:
            raise failure from failure.__cause__

    def stop(self) -> None:
        """Stop the program as a SIGTERM would, unless a signal has already arrived."""
        if self.received is None:
            self._handle(signal.SIGTERM, None)

    def _cancel(self) -> None:
        if (task := self._stoppable) is not None:
            task.get_loop().call_soon_threadsafe(self._react, task)

    def _react(self, task: asyncio.Task[Any]) -> None:
        task.cancel()
        self._reacted.set()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self.received is None:
            self.received, self._received_at = signal.Signals(number), time.monotonic()
            PULSE.stopped_at = self._received_at
            self.console.end_with(f"{name}: {self.stopping}")
            threading.Thread(target=self._wait_for_reaction, name="stop", daemon=True).start()
            self._cancel()
        elif number in SECOND_STOPS and time.monotonic() - self._received_at > ONE_STOP_S:
            try:
                self.console.end_with(f"{name}: {self._ending}")
                if self._run is not None:
                    record_immediate_end(self._run)
            finally:
                os._exit(128 + number)

    def _wait_for_reaction(self) -> None:
        if not self._reacted.wait(self._reaction_s):
            self.console.end_with(
                f"nothing has been stopped for {self._reaction_s:g} s: the event loop is blocked, by imports at the "
                "start or by code of an environment or a reward; a second signal ends the run at once"
            )


_woken: set[asyncio.AbstractEventLoop] = set()


@contextlib.contextmanager
def woken_by_signals(loop: asyncio.AbstractEventLoop) -> Generator[None]:
    """Wake an event loop of the main thread after every signal during the block. Otherwise a signal that arrives just
    before the loop waits, or in another thread, is handled only when something else wakes the loop.

    With a guard, whose pipe receives the signals, the loop reads their echo.
    """
    if threading.current_thread() is not threading.main_thread() or loop in _woken:
        yield
        return
    with contextlib.ExitStack() as own:
        if echoes:
            descriptor = echoes[-1]
        else:
            descriptor, write = os.pipe()
            own.callback(os.close, descriptor)
            own.callback(os.close, write)
            os.set_blocking(descriptor, False)
            os.set_blocking(write, False)
            own.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(write, warn_on_full_buffer=False))
        loop.add_reader(descriptor, _read_all, descriptor)
        own.callback(loop.remove_reader, descriptor)
        _woken.add(loop)
        own.callback(_woken.discard, loop)
        yield


def _read_all(descriptor: int) -> None:
    with contextlib.suppress(BlockingIOError):
        os.read(descriptor, 4096)


T = TypeVar("T")


def run_to_its_end(program: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine as `asyncio.run` does, and return its result.

    A `SystemExit` or `KeyboardInterrupt` in a task or callback usually ends an event loop at once, and cancels all its
    tasks. Here it only cancels the program, which can still save its state and close its resources, even if more such
    exceptions follow. The end does not wait for hanging threads of `asyncio.to_thread`, either.

    If this thread has a running loop, as in a notebook, that loop waits.

    Raises:
        SystemExit, KeyboardInterrupt: The first such exception, raised once the program has ended.
        BaseException: The error with which the program ended.
    """
    exit_of_others: BaseException | None = None
    with _running_loop_suspended(), _guarded(), asyncio.Runner() as runner:
        loop = runner.get_loop()
        loop.set_default_executor(UsersThreads())
        task = loop.create_task(program)
        with woken_by_signals(loop):
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
                task.exception()  # marks the exception of the cancelled program as retrieved
            raise exit_of_others
        return task.result()


def _guarded() -> contextlib.AbstractContextManager[None]:
    """Guard a program of the main thread, unless its session has a guard already."""
    if echoes or threading.current_thread() is not threading.main_thread():
        return contextlib.nullcontext()
    return guarded(scratch_root(), "", "start it again", ends_at_second=False)


@contextlib.contextmanager
def _running_loop_suspended() -> Generator[None]:
    """Let this thread run another event loop within a callback of its running one, as asyncio does not permit."""
    outer = asyncio._get_running_loop()
    if outer is None:
        yield
        return
    task = asyncio.current_task()
    if task is not None:
        asyncio.tasks._leave_task(outer, task)
    asyncio._set_running_loop(None)
    try:
        yield
    finally:
        asyncio.set_event_loop(outer)
        asyncio._set_running_loop(outer)
        if task is not None:
            asyncio.tasks._enter_task(outer, task)


def first_cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Find the error in a group that ended the run: the first of titan_rl's own errors or, if there is none, the first
    error."""
    leaves = list(_leaves(group))
    return next((error for error in leaves if isinstance(error, TitanRLError)), leaves[0])


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(cast("BaseExceptionGroup[BaseException]", error))
        else:
            yield error

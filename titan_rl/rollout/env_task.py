"""The calls into one environment, in a task of their own that nobody has to wait for."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from titan_rl.environment.types import TokenEnv
from titan_rl.errors import StrayCancellationError
from titan_rl.types import Completion
from titan_rl.user_code import summary

CLEANUP_S = 5.0
"""What a call that is cancelled has to end."""
MAX_CLOSE_S = 10.0

logger = logging.getLogger(__name__)

_left_behind: set[asyncio.Task[None]] = set()  # asyncio itself holds tasks weakly


class EnvTask:
    """Makes one call after the other in one task, so that a scope of anyio or asyncio that `reset` enters may be left
    in `close`.

    A call whose caller is cancelled, by a time limit for instance, is cancelled and has `CLEANUP_S` seconds to end. One
    that does not is left behind with a warning: the environment is closed when it ends, if it ever does.
    """

    def __init__(self, env: TokenEnv) -> None:
        self._env = env
        self._calls: asyncio.Queue[_Call | None] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None
        self._left_behind = False

    async def reset(self) -> Any:
        return await self._run(self._env.reset)

    async def step(self, completion: Completion) -> Any:
        return await self._run(lambda: self._env.step(completion))

    async def close(self, timeout_s: float) -> str | None:
        """Close the environment; return what went wrong. Cancellation waits for that, but not longer than the time
        limit, which is at most `MAX_CLOSE_S`. Returns at once where a call is left behind; closing follows that."""
        timeout_s = min(timeout_s, MAX_CLOSE_S)
        call, task = self._begin(self._env.close)
        self._calls.put_nowait(None)
        if self._left_behind:
            call.over.add_done_callback(lambda _: self._tell(call.failure))
            return None
        cancelled = await _settle(call.over, timeout_s)
        if not call.over.done():
            task.cancel()
            cancelled = await _settle(call.over, 1.0) or cancelled
            self._leave_behind_unless_over(call, task)
            call.failure = TimeoutError(f"it took longer than {timeout_s:g} s")
        self._tell(call.failure)
        if isinstance(call.failure, KeyboardInterrupt):
            raise call.failure
        if cancelled is not None:
            raise cancelled
        return None if call.failure is None else summary(call.failure)

    async def _run(self, function: Callable[[], Awaitable[Any]]) -> Any:
        call, task = self._begin(function)
        try:
            await asyncio.wait({call.over, task}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            if call.begun and not call.over.done():
                call.is_given_up = True
                task.cancel()
                await _settle(call.over, CLEANUP_S)
                self._leave_behind_unless_over(call, task)
            call.is_given_up = True
            raise
        if call.failure is not None:
            raise call.failure
        if not call.over.done():
            raise StrayCancellationError("the environment's task was cancelled, though nobody had asked for that")
        return call.result

    def _begin(self, function: Callable[[], Awaitable[Any]]) -> tuple[_Call, asyncio.Task[None]]:
        call = _Call(function)
        self._calls.put_nowait(call)
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._work())
        return call, self._task

    def _leave_behind_unless_over(self, call: _Call, task: asyncio.Task[None]) -> None:
        if not call.over.done():
            self._left_behind = True
            _left_behind.add(task)
            task.add_done_callback(_left_behind.discard)
            logger.warning("a call into %s does not end after it was cancelled, and is left behind", self._name)

    async def _work(self) -> None:
        while True:
            try:
                call = await self._calls.get()
            except asyncio.CancelledError:  # by a scope that the environment has entered; `close` leaves it
                continue
            if call is None:
                return
            if not call.is_given_up:
                await call.make()

    def _tell(self, failure: BaseException | None) -> None:
        if failure is not None:
            logger.warning("closing %s failed: %s", self._name, summary(failure))

    @property
    def _name(self) -> str:
        return type(self._env).__name__


class _Call:
    """
    Attributes:
        over: done when the call has ended.
        is_given_up: nobody waits for it.
    """

    def __init__(self, function: Callable[[], Awaitable[Any]]) -> None:
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.begun = False
        self.is_given_up = False
        self.result: Any = None
        self.failure: BaseException | None = None
        self._function = function

    async def make(self) -> None:
        self.begun = True
        try:
            self.result = await self._function()
        except GeneratorExit as error:
            self.failure = error
            raise
        except BaseException as error:  # such as SystemExit, which would end the event loop
            self.failure = error
        finally:
            self.over.set_result(None)
        if self.is_given_up and (task := asyncio.current_task()) is not None:
            task.uncancel()


async def _settle(future: asyncio.Future[None], seconds: float) -> asyncio.CancelledError | None:
    """Wait so long for `future`, also if the caller is cancelled: that is returned."""
    loop = asyncio.get_running_loop()
    deadline, cancelled = loop.time() + seconds, None
    while not future.done() and (left := deadline - loop.time()) > 0:
        try:
            await asyncio.wait({future}, timeout=left)
        except asyncio.CancelledError as error:
            cancelled = error
    return cancelled

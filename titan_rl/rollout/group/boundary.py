"""Boundary to user code: errors and time limits end one rollout, and environment calls run in their own task."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any

from titan_rl.core.calls.cancellation import asked_to_cancel, is_ctrl_c, passes
from titan_rl.core.calls.stopwatch import Stopwatch
from titan_rl.core.calls.user_code import Failure, describe, stood_at, task_place, where
from titan_rl.core.errors import PromptTooLongError, StrayCancellationError
from titan_rl.core.tracing.spans import span
from titan_rl.rollout.environment.seats import SeatedEnv, TokenSeat
from titan_rl.rollout.environment.threaded import EnvMethods
from titan_rl.rollout.environment.types import AgentEnv, RolloutPolicy, TokenEnv
from titan_rl.rollout.types import Rollout, RolloutStatus


class RolloutEnded(Exception):
    """A rollout is over, with this status and what to say about it."""

    def __init__(self, status: RolloutStatus, error: str | Failure | None = None) -> None:
        super().__init__(status, error)
        self.status = status
        self.error = error.error if isinstance(error, Failure) else error
        self.failure = error if isinstance(error, Failure) else None


class EndsWith:
    """What the block raises ends the rollout with a status, or with ERROR_TIMEOUT once a deadline has passed. A
    `PromptTooLongError` is TRUNCATED_PROMPT.

    Example:

        async with EndsWith(RolloutStatus.ERROR_ENV, deadline=loop.time() + 60.0, watch=watch):
            observation = await env.reset()

    Args:
        deadline: by the event loop's clock.
        watch: runs within the block.
        when_late: makes what is raised in the place of ERROR_TIMEOUT.

    Raises:
        RolloutEnded: nothing else, but for a cancellation of the rollout itself.
    """

    def __init__(
        self,
        status: RolloutStatus,
        deadline: float | None = None,
        *,
        watch: Stopwatch | None = None,
        when_late: Callable[[], RolloutEnded] | None = None,
    ) -> None:
        self._status = status
        self._timeout = None if deadline is None else asyncio.timeout_at(deadline)
        self._watch = watch
        self._when_late = when_late
        self._task: asyncio.Task[Any] | None = None

    async def __aenter__(self) -> None:
        self._task = asyncio.current_task()
        if self._timeout is not None:
            await self._timeout.__aenter__()
        if self._watch is not None:
            self._watch.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._watch is not None:
            self._watch.stop()
        try:
            if self._timeout is not None:
                await self._timeout.__aexit__(kind, error, traceback)
        except TimeoutError as late:
            error = late
        if error is None or passes(error, self._task):
            return
        if isinstance(error, asyncio.CancelledError) and asked_to_cancel():
            return
        # Else a cancellation is not the rollout's: something it waited for was cancelled, such as a future of a client
        # that closed. Any other BaseException may be the SystemExit of a tool that thinks it is a program.
        if isinstance(error, PromptTooLongError):
            raise RolloutEnded(RolloutStatus.TRUNCATED_PROMPT, str(error)) from error
        is_late = self._timeout is not None and self._timeout.expired()
        if not (is_late and isinstance(error, Exception)):
            raise RolloutEnded(self._status, Failure.of(error)) from error
        if self._when_late is not None:
            raise self._when_late() from error
        late = Failure.of(error, f"TimeoutError: {_LIMITS[self._status]}")
        raise RolloutEnded(RolloutStatus.ERROR_TIMEOUT, late) from error


_LIMITS = {
    RolloutStatus.ERROR_ENV: "the environment took longer than env_timeout_s",
    RolloutStatus.ERROR_GENERATE: "the completion took longer than generate_timeout_s",
}


CLEANUP_S = 5.0
"""What a call that is cancelled has to end."""
MAX_CLOSE_S = 10.0

logger = logging.getLogger(__name__)

_left_behind: set[asyncio.Task[None]] = set()  # asyncio itself holds tasks weakly


class EnvCalls:
    """Makes one call after the other in one task, so that a scope of anyio or asyncio that `reset` enters may be left
    in `close`.

    A call whose caller is cancelled, by a time limit for instance, is cancelled and has `CLEANUP_S` seconds to end. One
    that does not is left behind with a warning: the environment is closed when it ends, if it ever does.
    """

    def __init__(self, env: TokenEnv | AgentEnv | SeatedEnv) -> None:
        self.env: Any = env
        self._methods = EnvMethods(env)
        self._calls: deque[_Call] = deque()  # not begun
        self._closes = False  # the last of them is to close
        self._idle: asyncio.Future[None] | None = None  # what the task waits for while there is none
        self._task: asyncio.Task[None] | None = None
        self._left_behind = False
        self._seconds = 0.0  # of calls, but for `close`
        may_ask = hasattr(env, "play") or hasattr(env, "play_seats")  # looking for a protocol takes many times as long
        self.asks = may_ask and isinstance(env, AgentEnv | SeatedEnv)  # the policy, within its calls

    def own_seconds(self, asked_s: float) -> float:
        """Of all calls so far but `close`, less those in which the policy was asked.

        Args:
            asked_s: of the rollout's requests.
        """
        return max(0.0, self._seconds - asked_s) if self.asks else self._seconds

    async def reset(self) -> Any:
        return await self._run("env reset", lambda: self._methods.result("reset"))

    async def step(self, given: Any) -> Any:
        return await self._run("env step", lambda: self._methods.result("step", given))

    async def play(self, policy: RolloutPolicy, rollout: Rollout) -> None:
        await self._run("env play", lambda: self._playing("play", policy, rollout))

    async def play_seats(self, seats: Mapping[str, TokenSeat]) -> None:
        await self._run("env play", lambda: self._playing("play_seats", seats))

    async def _playing(self, name: str, *arguments: Any) -> None:
        playing = getattr(self.env, name)(*arguments)
        if not inspect.isawaitable(playing):
            raise TypeError(f"{name} of {self._name} is a plain function; it must be async, since it awaits the policy")
        await playing

    async def close(self, timeout_s: float) -> Failure | None:
        """Close the environment; return what went wrong. Cancellation waits for that, but not longer than the time
        limit, which is at most `MAX_CLOSE_S`. Returns at once where a call is left behind; closing follows that."""
        timeout_s = min(timeout_s, MAX_CLOSE_S)
        self._closes = True
        call, task = self._begin(self._methods.close)
        if self._left_behind:
            call.then = self._tell
            return None
        cancelled = await _settle(call, timeout_s)
        if not call.is_over:
            place = task_place(task)
            task.cancel()
            cancelled = await _settle(call, 1.0) or cancelled
            self._leave_behind_unless_over(call, task)
            late = TimeoutError(f"it took longer than {timeout_s:g} s")
            stood_at(late, place or (None if call.failure is None else where(call.failure)))
            call.failure = late
        self._tell(call.failure)
        if call.failure is not None and is_ctrl_c(call.failure):
            raise call.failure
        if cancelled is not None:
            raise cancelled
        return None if call.failure is None else Failure.of(call.failure)

    async def _run(self, name: str, function: Callable[[], Awaitable[Any]]) -> Any:
        clock = asyncio.get_running_loop().time
        began = clock()
        try:
            with span(name, "environment", fine=True):
                return await self._ask(function)
        finally:
            self._seconds += clock() - began

    async def _ask(self, function: Callable[[], Awaitable[Any]]) -> Any:
        call, task = self._begin(function)
        try:
            await call.wait()
        except asyncio.CancelledError as error:
            if call.begun and not call.is_over:
                call.is_given_up = True
                stood_at(error, task_place(task))
                task.cancel()
                await _settle(call, CLEANUP_S)
                self._leave_behind_unless_over(call, task)
            call.is_given_up = True
            if call.failure is not None and call.failure is not error:
                error.__cause__ = call.failure  # it knows the line at which a thread stood
            raise
        if call.failure is not None:
            raise call.failure
        if not call.is_over:
            raise StrayCancellationError("the environment's task was cancelled, though nobody had asked for that")
        return call.result

    def _begin(self, function: Callable[[], Awaitable[Any]]) -> tuple[_Call, asyncio.Task[None]]:
        call = _Call(function)
        self._calls.append(call)
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._work())
            self._task.add_done_callback(partial(self._ended, call))
        elif self._idle is not None and not self._idle.done():
            self._idle.set_result(None)
        return call, self._task

    def _ended(self, first: _Call, task: asyncio.Task[None]) -> None:
        first.wake()  # where it is cancelled before it begins
        if not task.cancelled():
            task.exception()  # it is its call's failure, and told there

    def _leave_behind_unless_over(self, call: _Call, task: asyncio.Task[None]) -> None:
        if not call.is_over:
            self._left_behind = True
            _left_behind.add(task)
            task.add_done_callback(_left_behind.discard)
            logger.warning("a call into %s does not end after it was cancelled, and is left behind", self._name)

    async def _work(self) -> None:
        while True:
            if self._calls:
                call = self._calls.popleft()
                if not call.is_given_up:
                    await call.make()
            elif self._closes:
                return
            else:
                self._idle = asyncio.get_running_loop().create_future()
                with suppress(asyncio.CancelledError):  # by a scope that the environment has entered; `close` leaves it
                    await self._idle

    def _tell(self, failure: BaseException | None) -> None:
        if failure is not None:
            logger.warning("closing %s failed: %s", self._name, describe(failure))

    @property
    def _name(self) -> str:
        return type(self.env).__name__


class _Call:
    """
    Attributes:
        is_over: the call has ended.
        is_given_up: nobody waits for it.
        then: called with its failure, if any, when it ends.
    """

    def __init__(self, function: Callable[[], Awaitable[Any]]) -> None:
        self.begun = False
        self.is_over = False
        self.is_given_up = False
        self.result: Any = None
        self.failure: BaseException | None = None
        self.then: Callable[[BaseException | None], object] | None = None
        self._function = function
        self._waiter: asyncio.Future[None] | None = None

    async def wait(self) -> None:
        """Return when the call has ended, or by `wake`."""
        if not self.is_over:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def make(self) -> None:
        self.begun = True
        task = asyncio.current_task()
        try:
            self.result = await self._function()
        except BaseException as error:  # such as SystemExit, which would end the event loop
            self.failure = error
            if passes(error, task):
                raise
        finally:
            self.is_over = True
            self.wake()
            if self.then is not None:
                self.then(self.failure)
        if self.is_given_up and task is not None:
            task.uncancel()


async def _settle(call: _Call, seconds: float) -> asyncio.CancelledError | None:
    """Wait so long for the end of `call`, also if the caller is cancelled: that is returned."""
    is_late, cancelled = False, None

    def give_up() -> None:
        nonlocal is_late
        is_late = True
        call.wake()

    timer = asyncio.get_running_loop().call_later(seconds, give_up)
    while not (call.is_over or is_late):
        try:
            await call.wait()
        except asyncio.CancelledError as error:
            cancelled = error
    timer.cancel()
    return cancelled

"""Boundary to user code: errors and time limits end one rollout, and environment calls run in their own task."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from functools import partial
from types import TracebackType
from typing import Any

from titan_rl.core.calls.cancellation import cancel_requested, is_ctrl_c, must_propagate
from titan_rl.core.calls.pulse import PULSE, CallInterrupted
from titan_rl.core.calls.stopwatch import Stopwatch
from titan_rl.core.calls.user_code import Failure, describe, record_location, task_location, where
from titan_rl.core.errors import PromptTooLongError, StrayCancellationError
from titan_rl.core.tracing.spans import span
from titan_rl.rollout.environment.threaded import EnvMethods
from titan_rl.rollout.environment.types import AgentEnv, RolloutPolicy, SeatedEnv, TokenSeat
from titan_rl.rollout.types import Rollout, RolloutStatus


class RolloutEnded(Exception):
    """End of a rollout, with its status and error."""

    def __init__(self, status: RolloutStatus, error: str | Failure | None = None) -> None:
        super().__init__(status, error)
        self.status = status
        self.error = error.error if isinstance(error, Failure) else error
        self.failure = error if isinstance(error, Failure) else None


class TimeIsUp(RolloutEnded):
    """End of a rollout whose own time is used up. Requests in flight return with the tokens they have, which become
    part of the rollout."""


@dataclass(frozen=True, slots=True)
class TimeBudget:
    """Time that a rollout may use itself (`rollout.rollout_timeout_s`); the seats of a game share one."""

    watch: Stopwatch
    rollouts: Sequence[Rollout]

    def error(self) -> TimeIsUp:
        """Exception for the end of the time.

        Excluding the slowest rollouts would bias training towards short ones, so their finished turns are judged as a
        truncated rollout. Only a rollout without any turn ends in an error.
        """
        has_turns = any(rollout.turns for rollout in self.rollouts)
        status = RolloutStatus.TRUNCATED_TIME if has_turns else RolloutStatus.ERROR_TIMEOUT
        return TimeIsUp(status, f"its own time is up: rollout_timeout_s is {self.watch.limit_s:g}")


@dataclass(eq=False)
class UserCodeBoundary:
    """Context manager that turns exceptions of user code into `RolloutEnded` with a status: `status`, ERROR_TIMEOUT
    once the deadline has passed, or TRUNCATED_PROMPT for a `PromptTooLongError`.

    Example:

        async with UserCodeBoundary(RolloutStatus.ERROR_ENV, deadline=loop.time() + 60.0, watch=watch):
            observation = await env.reset()

    Args:
        status: Status of a rollout that an exception ends.
        deadline: Time limit of the block, by the event loop's clock.
        watch: Stopwatch that runs within the block.
        time_budget: Time whose end is the deadline, if it is. The rollout then ends with `time_budget.error()`.

    Raises:
        RolloutEnded: the block raised an exception, except for a cancellation of the rollout itself.

    A rollout enters four of these, and a context manager of `asynccontextmanager` takes longer than this class.
    """

    status: RolloutStatus
    deadline: float | None = None
    _: KW_ONLY
    watch: Stopwatch | None = None
    time_budget: TimeBudget | None = None

    def __post_init__(self) -> None:
        self._timeout = None if self.deadline is None else asyncio.timeout_at(self.deadline)
        self._task: asyncio.Task[Any] | None = None

    async def __aenter__(self) -> None:
        self._task = asyncio.current_task()
        if self._timeout is not None:
            await self._timeout.__aenter__()
        if self.watch is not None:
            self.watch.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.watch is not None:
            self.watch.stop()
        try:
            if self._timeout is not None:
                await self._timeout.__aexit__(kind, error, traceback)
        except TimeoutError as late:
            error = late
        if error is None or must_propagate(error, self._task):
            return
        if isinstance(error, asyncio.CancelledError) and cancel_requested():
            return
        if isinstance(error, CallInterrupted):
            PULSE.returned()
        # Any other cancellation comes from an awaited object, such as a future of a client that closed. Other
        # BaseExceptions may be the SystemExit of a tool written as a program.
        if isinstance(error, PromptTooLongError):
            raise RolloutEnded(RolloutStatus.TRUNCATED_PROMPT, str(error)) from error
        is_late = self._timeout is not None and self._timeout.expired()
        if not (is_late and isinstance(error, Exception)):
            raise RolloutEnded(self.status, Failure.of(error)) from error
        if self.time_budget is not None:
            raise self.time_budget.error() from error
        late = Failure.of(error, f"TimeoutError: {_LIMITS[self.status]}")
        raise RolloutEnded(RolloutStatus.ERROR_TIMEOUT, late) from error


_LIMITS = {
    RolloutStatus.ERROR_ENV: "the environment took longer than env_timeout_s",
    RolloutStatus.ERROR_GENERATE: "the completion took longer than generate_timeout_s",
}


CLEANUP_S = 5.0
"""Time for a cancelled call to end."""
MAX_CLOSE_S = 10.0

logger = logging.getLogger(__name__)

_abandoned_tasks: set[asyncio.Task[None]] = set()  # asyncio itself holds tasks weakly


class EnvCalls:
    """Calls of one environment, made in sequence in one task, so that `close` may leave a scope of anyio or asyncio
    that `reset` entered.

    A call whose caller is cancelled, by a time limit for instance, is cancelled and has `CLEANUP_S` seconds to end.
    After that it is abandoned with a warning, and the environment is closed when the call ends, if it ever does.
    """

    def __init__(self, env: Any) -> None:
        self.env = env
        self._methods = EnvMethods(env)
        self._calls: deque[_Call] = deque()  # calls that have not begun
        self._closes = False  # whether the last call is `close`
        self._idle: asyncio.Future[None] | None = None  # awaited by the task while there is no call
        self._task: asyncio.Task[None] | None = None
        self._has_abandoned_call = False
        self._seconds = 0.0  # seconds spent in calls except `close`
        # Checking a protocol takes many times as long as looking up one method.
        self.has_seats = hasattr(env, "play_seats") and isinstance(env, SeatedEnv)
        self.is_agent = hasattr(env, "play") and isinstance(env, AgentEnv)

    def own_seconds(self, request_s: float) -> float:
        """Seconds spent in calls so far, without `close` and without the requests made in them.

        Args:
            request_s: Seconds of the rollout's requests.
        """
        requests_policy = self.has_seats or self.is_agent  # the requests are made within the environment's calls
        return max(0.0, self._seconds - request_s) if requests_policy else self._seconds

    async def reset(self) -> Any:
        return await self._run("env reset", self._methods.result, "reset")

    async def step(self, given: Any) -> Any:
        return await self._run("env step", self._methods.result, "step", given)

    async def play(self, policy: RolloutPolicy, rollout: Rollout) -> None:
        await self._run("env play", self._play, "play", policy, rollout)

    async def play_seats(self, seats: Mapping[str, TokenSeat]) -> None:
        await self._run("env play", self._play, "play_seats", seats)

    async def close(self, timeout_s: float) -> Failure | None:
        """Close the environment and return its failure, if any. A cancellation is delayed until the environment is
        closed, but at most for the time limit, which is at most `MAX_CLOSE_S`. Returns immediately if a call was
        abandoned; the environment is then closed after that call."""
        timeout_s = min(timeout_s, MAX_CLOSE_S)
        self._closes = True
        call = _Call(self._methods.close, type(self.env).__name__)
        task = self._begin(call)
        if self._has_abandoned_call:
            call.logs_failure = True
            return None
        cancelled = await _settle(call, timeout_s)
        if not call.is_over:
            location = task_location(task)
            task.cancel()
            cancelled = await _settle(call, 1.0) or cancelled
            self._abandon_unless_over(call, task)
            late = TimeoutError(f"it took longer than {timeout_s:g} s")
            record_location(late, location or (None if call.failure is None else where(call.failure)))
            call.failure = late
        call.log_failure()
        if call.failure is not None and is_ctrl_c(call.failure):
            raise call.failure
        if cancelled is not None:
            raise cancelled
        return None if call.failure is None else Failure.of(call.failure)

    async def _play(self, name: str, *arguments: Any) -> None:
        playing = getattr(self.env, name)(*arguments)
        if not inspect.isawaitable(playing):
            kind = type(self.env).__name__
            raise TypeError(f"{name} of {kind} is a plain function; it must be async, since it awaits the policy")
        await playing

    async def _run(self, name: str, method: Callable[..., Awaitable[Any]], *arguments: Any) -> Any:
        clock = asyncio.get_running_loop().time
        began = clock()
        try:
            with span(name, "environment", fine=True):
                return await self._ask(_Call(partial(method, *arguments), type(self.env).__name__))
        finally:
            self._seconds += clock() - began

    async def _ask(self, call: _Call) -> Any:
        task = self._begin(call)
        try:
            await call.wait()
        except asyncio.CancelledError as error:
            if call.has_started and not call.is_over:
                call.is_abandoned = True
                record_location(error, task_location(task))
                task.cancel()
                await _settle(call, CLEANUP_S)
                self._abandon_unless_over(call, task)
            call.is_abandoned = True
            if call.failure is not None and call.failure is not error:
                error.__cause__ = call.failure  # contains the line that a thread was executing
            raise
        if call.failure is not None:
            raise call.failure
        if not call.is_over:
            raise StrayCancellationError("the environment's task was cancelled, although nobody requested it")
        return call.result

    def _begin(self, call: _Call) -> asyncio.Task[None]:
        """Queue a call, and return the environment's task, which makes it."""
        self._calls.append(call)
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._work())
            self._task.add_done_callback(partial(self._ended, call))
        elif self._idle is not None and not self._idle.done():
            self._idle.set_result(None)
        return self._task

    def _ended(self, first: _Call, task: asyncio.Task[None]) -> None:
        first.wake()  # needed if the task was cancelled before it began
        if not task.cancelled():
            task.exception()  # marks it as retrieved; the call has it as its failure

    def _abandon_unless_over(self, call: _Call, task: asyncio.Task[None]) -> None:
        if not call.is_over:
            self._has_abandoned_call = True
            _abandoned_tasks.add(task)
            task.add_done_callback(_abandoned_tasks.discard)
            logger.warning(
                "a call into %s does not end after its cancellation, and is abandoned", type(self.env).__name__
            )

    async def _work(self) -> None:
        while True:
            if self._calls:
                call = self._calls.popleft()
                if not call.is_abandoned:
                    await call.make()
            elif self._closes:
                return
            else:
                self._idle = asyncio.get_running_loop().create_future()
                with suppress(asyncio.CancelledError):  # by a scope that `reset` entered and `close` leaves
                    await self._idle


class _Call:
    """One call of an environment's method.

    Args:
        method: The method, with its arguments.
        env_name: Class of the environment, for messages.

    Attributes:
        is_over: Whether the call has ended.
        is_abandoned: Whether the caller no longer waits.
        logs_failure: Whether a failure is logged when the call ends.
    """

    def __init__(self, method: Callable[[], Awaitable[Any]], env_name: str) -> None:
        self.has_started = False
        self.is_over = False
        self.is_abandoned = False
        self.result: Any = None
        self.failure: BaseException | None = None
        self.logs_failure = False
        self._method = method
        self._env_name = env_name
        self._waiter: asyncio.Future[None] | None = None

    async def wait(self) -> None:
        """Wait until the call has ended, or for `wake`."""
        if not self.is_over:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def make(self) -> None:
        self.has_started = True
        task = asyncio.current_task()
        try:
            self.result = await self._method()
        except BaseException as error:  # including SystemExit, which would end the event loop
            self.failure = error
            if must_propagate(error, task):
                raise
        finally:
            self.is_over = True
            self.wake()
            if self.logs_failure:
                self.log_failure()
        if self.is_abandoned and task is not None:
            task.uncancel()

    def log_failure(self) -> None:
        if self.failure is not None:
            logger.warning("closing %s failed: %s", self._env_name, describe(self.failure))


async def _settle(call: _Call, seconds: float) -> asyncio.CancelledError | None:
    """Wait up to `seconds` for the end of `call`, even if the caller is cancelled. Returns that cancellation, if
    any."""
    is_late, cancelled = False, None

    def time_out() -> None:
        nonlocal is_late
        is_late = True
        call.wake()

    timer = asyncio.get_running_loop().call_later(seconds, time_out)
    while not (call.is_over or is_late):
        try:
            await call.wait()
        except asyncio.CancelledError as error:
            cancelled = error
    timer.cancel()
    return cancelled

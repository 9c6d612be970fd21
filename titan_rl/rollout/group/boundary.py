"""The edge to code that is not ours: environments and generation. What goes wrong behind it ends one rollout."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Any

from titan_rl.core.calls.cancellation import asked_to_cancel, passes
from titan_rl.core.calls.stopwatch import Stopwatch
from titan_rl.core.calls.user_code import Failure
from titan_rl.core.errors import PromptTooLongError
from titan_rl.rollout.types import RolloutStatus


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

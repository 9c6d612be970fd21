"""Sessions of a group, each finished once, and guarded calls of user callbacks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from types import TracebackType

from titan_rl.core.calls.cancellation import is_ctrl_c
from titan_rl.core.calls.user_code import describe
from titan_rl.types import Completion, GenerateFn, SamplingParams

logger = logging.getLogger(__name__)


class Callbacks:
    """Calls them. What one raises is logged, the first time for each name, and stops nothing.

    Example:

        callbacks = Callbacks()
        callbacks.call("finish_session", router.finish_session, "g17/3")
    """

    def __init__(self) -> None:
        self._failed: set[str] = set()

    def call(self, name: str, function: Callable[..., object], *args: object) -> None:
        try:
            function(*args)
        except BaseException as error:  # not awaited, so that a CancelledError is nobody's who waits here
            if is_ctrl_c(error):
                raise
            if name not in self._failed:
                self._failed.add(name)
                logger.error("%s failed: %s; said once, the run goes on", name, describe(error), exc_info=error)


class Sessions:
    """Finishes those that are left when its block ends: of rollouts that were run again, were cancelled, or were
    lost with the process that ran them.

    Example:

        with Sessions(router.finish_session) as sessions:
            await rollouter.run_group(sessions.track(router.generate), sample, ...)
    """

    def __init__(self, finish_session: Callable[[str], object]) -> None:
        self._finish_session = finish_session
        self._open: set[str] = set()
        self._callbacks = Callbacks()

    def open(self, session_id: str | None) -> None:
        """Note that a request of this session begins."""
        if session_id is not None:
            self._open.add(session_id)

    def track(self, generate: GenerateFn) -> GenerateFn:
        """`generate`, whose calls open their session."""

        async def tracked(
            prompt_token_ids: Sequence[int],
            *,
            request_id: str,
            session_id: str | None = None,
            sampling: SamplingParams,
        ) -> Completion:
            self.open(session_id)
            return await generate(prompt_token_ids, request_id=request_id, session_id=session_id, sampling=sampling)

        return tracked

    def finish(self, session_id: str) -> None:
        """No further request of this session comes. One that is not open is left alone."""
        if session_id in self._open:
            self._open.discard(session_id)
            self._callbacks.call("finish_session", self._finish_session, session_id)

    def __enter__(self) -> Sessions:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for session_id in sorted(self._open):
            self.finish(session_id)

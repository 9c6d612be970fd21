"""Guarded calls of users' callbacks, and the sessions of a group, each of which is finished once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import TracebackType

from titan_rl.core.calls.cancellation import is_ctrl_c
from titan_rl.core.calls.user_code import describe

logger = logging.getLogger(__name__)


class Callbacks:
    """Guard of users' callbacks: exceptions are logged, once for each name, and go no further.

    Example:

        callbacks = Callbacks()
        with callbacks.guarded("finish_session"):
            router.finish_session("g17/3")
    """

    def __init__(self) -> None:
        self._failed: set[str] = set()

    @contextmanager
    def guarded(self, name: str) -> Generator[None]:
        """Context of one call, in which nothing may be awaited."""
        try:
            yield
        except BaseException as error:  # without an await, a CancelledError cannot be that of the caller
            if is_ctrl_c(error):
                raise
            if name not in self._failed:
                self._failed.add(name)
                logger.error(
                    "%s failed: %s; it is reported once, and the run continues", name, describe(error), exc_info=error
                )


class Sessions:
    """Open sessions of a group. Those still open at the end of the block are finished: sessions of rollouts that were
    run again, were cancelled, or were lost with their process.

    Example:

        with Sessions(router.finish_session) as sessions:
            sessions.open("g17/3")
            sessions.finish("g17/3")
    """

    def __init__(self, finish_session: Callable[[str], object]) -> None:
        self._finish_session = finish_session
        self._open: set[str] = set()
        self._callbacks = Callbacks()

    def open(self, session_id: str | None) -> None:
        """Note that a request of this session begins."""
        if session_id is not None:
            self._open.add(session_id)

    def finish(self, session_id: str) -> None:
        """Finish a session, which gets no further request. Does nothing if it is not open."""
        if session_id in self._open:
            self._open.discard(session_id)
            with self._callbacks.guarded("finish_session"):
                self._finish_session(session_id)

    def __enter__(self) -> Sessions:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for session_id in sorted(self._open):
            self.finish(session_id)

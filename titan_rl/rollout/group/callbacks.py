"""Functions of the user that are only told of something."""

from __future__ import annotations

import logging
from collections.abc import Callable

from titan_rl.core.calls.cancellation import is_ctrl_c
from titan_rl.core.calls.user_code import describe

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
